"""The dashboards as typed code: one file each, and ``parts`` for what they share."""
