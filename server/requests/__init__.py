"""The requests of the API while they are here: what each asked, what it came to, all of them counted."""
