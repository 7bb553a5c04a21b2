"""The pictures of the report, a module for each. `chart` draws rows in a width in pixels, `says` is their headline,
`table` picks the rows (default: rows with figures), `COLUMNS` are shown beneath. The module's docstring is the caption.
"""
