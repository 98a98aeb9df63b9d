"""Groups that are not plain full attention: sliding and chunked windows, recurrent states."""
