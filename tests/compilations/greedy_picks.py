"""Specialisations of `kernels/greedy_picks.py`."""

from specialisation import Compilation

from tiered.kernels.greedy_picks import _draw, _measure, tile_of, warps_of

_COMMON = {"drawn best": "*i64", "left": "*fp32", "masses": "*fp64", "number rows tiles trials": "i32"}
_TYPES = {
    _measure: _COMMON | {"sketch left_then": "*fp32", "usable": "*u8", "width": "i32", "same farthest": "fp32"},
    _draw: _COMMON | {"draws": "*fp64", "picks": "*i64", "clusters": "i32", "as_good": "fp32"},
}
COMPILATIONS = tuple(
    Compilation(
        kernel=kernel,
        types=types,
        constexprs={"TILE": tile_of(trials)},
        multiples="sketch width" if kernel is _measure else "",
        num_warps=warps_of(tile_of(trials)),
        byte_loads=2 if kernel is _measure else 0,  # flags
    )
    for trials in (16, 32)
    for kernel, types in _TYPES.items()
)
