"""Results as sentences, tables and figures, and how they are shown: on a terminal, as a page, as CSV, PNG and SVG."""
