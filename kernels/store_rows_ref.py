"""Write keys and values of rows of several calls to the stores of each: the oracle, in plain torch."""

from tiered.kernels.store_table import Stored, StoreTable


def store_rows(keys: Stored, values: Stored, table: StoreTable, layer: int) -> None:
    """Write `keys` and `values` of all rows of `table`, as they are stored, to the columns of each. `layer`: its place
    in the memory.

    Raises:
        ValueError: shape or dtype do not fit the memory of `table`.
    """
    check_stored(keys, values, table)
    first = 0
    for call in table.calls:
        count = len(call.columns)
        for number in range(call.keys.shape[1]):
            for memory, rows in (call.keys, keys), (call.values, values):
                columns = table.words(memory)[layer, number, :, call.columns.start : call.columns.stop]
                columns.copy_(rows[0, :, first : first + count])
            first += count


def check_stored(keys: Stored, values: Stored, table: StoreTable) -> None:
    """Raise `ValueError` unless `keys` and `values` fit the memory of `table`."""
    memory = table.words(table.calls[0].keys)
    wanted = (1, memory.shape[2], len(table.rows), memory.shape[4]), memory.dtype
    for name, rows in (("keys", keys), ("values", values)):
        if (tuple(rows.shape), rows.dtype) != wanted:
            raise ValueError(
                f"{name} {tuple(rows.shape)} of {rows.dtype} do not fit memory for {wanted[0]} of {wanted[1]}"
            )
