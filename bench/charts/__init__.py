"""The pictures of the report. A module for each: `chart` of rows and a width in pixels, `says` what is to be seen in
them, `table` picks the rows (default: those with figures), `COLUMNS` are shown beneath; its docstring is the caption.
"""
