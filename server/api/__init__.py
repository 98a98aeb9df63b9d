"""The HTTP endpoints of OpenAI's API: request and response bodies, the logic of each endpoint, and the routes.

In each endpoint's package, ``protocol`` defines the bodies and ``service`` the logic, which imports no HTTP
code. ``router`` lists all routes.
"""
