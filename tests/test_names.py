"""The answer for a name that is almost right."""

import pytest

from tiered.core.checks import unknown_name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("thresold", "unknown commit rule 'thresold'; did you mean 'threshold'? allowed: static, threshold"),
        ("STATIC", "unknown commit rule 'STATIC'; did you mean 'static'? allowed: static, threshold"),
        ("xyz", "unknown commit rule 'xyz'; allowed: static, threshold"),
        ("", "unknown commit rule ''; allowed: static, threshold"),
        (7, "unknown commit rule 7; allowed: static, threshold"),
    ],
)
def test_unknown_name(name: object, message: str):
    assert str(unknown_name("commit rule", name, ["threshold", "static"])) == message


@pytest.mark.parametrize(
    ("name", "meant"), [("max_length", "max_new_tokens"), ("do_sample", "temperature"), ("prompt", None)]
)
def test_names_of_other_libraries(name: str, meant: str | None):
    allowed = ["min_length", "max_new_tokens", "cfg_scale", "temperature", "prompt_cache_key"]
    assert (f"did you mean {meant!r}?" in str(unknown_name("option", name, allowed))) == (meant is not None)


def test_the_message_if_there_is_no_name():
    assert str(unknown_name("option of policy 'none'", "window", [])) == (
        "'window' is no option of policy 'none'; there is none"
    )


def test_the_nearest_name_keeps_its_case():
    assert "did you mean 'GSAI-ML/LLaDA-1.5'?" in str(unknown_name("model", "gsai-ml/llada-1.5", ["GSAI-ML/LLaDA-1.5"]))
