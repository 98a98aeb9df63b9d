"""The dashboards as typed code, one file each; ``parts`` has the common parts."""
