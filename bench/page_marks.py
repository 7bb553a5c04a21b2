"""Parts of Markdown pages that scripts fill: what stands between `<!-- name -->` and `<!-- /name -->`.

A part of the other scripts here.
"""


def between_marks(text: str, mark: str) -> str | None:
    """What stands between the marks; None without them."""
    _, begin, rest = text.partition(f"<!-- {mark} -->")
    inside, end, _ = rest.partition(f"<!-- /{mark} -->")
    return inside.strip() if begin and end else None


def put_between_marks(text: str, mark: str, inside: str) -> str:
    """`text` with `inside` between the marks, which it has."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    return f"{text.partition(begin)[0]}{begin}\n{inside}\n{end}{text.partition(end)[2]}"
