"""Pictures and words of the pages: plain functions from a snapshot to SVG or text, without a clock or a server.

`numbers` words a figure; `palette` gives each request a colour; `svg` holds the few primitives that `charts`, `table`
and `blocks` draw with; `view` gathers what the dashboard's partials show; `templates` sets up Jinja.
"""
