"""Figures of the pages: traces of plotly and all of their numbers, and pictures of them."""
