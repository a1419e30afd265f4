"""People and programs: the HTTP API, the pages, the command line and the life of the process."""
