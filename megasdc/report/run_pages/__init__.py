"""How do runs look on a page: one, several compared, a sweep? Files to tables, tables to figures, figures to HTML."""
