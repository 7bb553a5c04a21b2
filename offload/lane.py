"""Books: the directions of copying."""

from enum import StrEnum


class Lane(StrEnum):
    """A direction of copying; jobs of one lane run in the order of their submission."""

    STORE = "store"  # device → host
    FETCH = "fetch"  # host → device
    SAVE = "save"  # host → disk: layers of weights that go to the scratch file
    LOAD = "load"  # disk → host
