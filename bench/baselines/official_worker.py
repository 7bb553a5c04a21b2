"""One official implementation: requests as lines of JSON on stdin, answers on stdout. Runs in the venv of that code.

    python -I official_worker.py IMPLEMENTATION CODE_ROOT CHECKPOINT THREADS

A request is {"prompt": [ids], "length": 128, "block": 32, "steps": 128, "threshold": null, "early": null, "options":
{…}}. Its options have the implementation's own names. The answer is {"tokens": […], "seconds": 1.5, "forwards": 128},
or {"failed": why}. The first line is {"torch": …, "transformers": …}, and comes when the checkpoint is loaded. Only
functions that the official code offers to its users are called, and its models are put on the CPU.
"""

import importlib
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

Request = dict[str, Any]
# Ids [1, prompt] and the request; gives ids [1, prompt + length].
Generate = Callable[[torch.Tensor, Request], torch.Tensor]


class Implementations:
    """A method for each implementation, which loads it and returns a function that answers."""

    def __init__(self, code: Path, checkpoint: Path) -> None:
        self._code, self._checkpoint = code, checkpoint
        self._mask = json.loads((checkpoint / "config.json").read_text())["mask_token_id"]
        self._forwards = 0

    def load(self, name: str) -> dict[str, Any]:
        """Load the implementation of that name. Returns the versions of its packages."""
        self._generate: Generate = getattr(self, name)()
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def answer(self, request: Request) -> dict[str, Any]:
        """Answer one prompt."""
        ids, self._forwards = torch.tensor([request["prompt"]]), 0
        torch.manual_seed(0)
        began = time.perf_counter()
        with torch.no_grad():
            tokens = self._generate(ids, request)
        seconds = time.perf_counter() - began
        return {"tokens": tokens[0, ids.shape[1] :].tolist(), "seconds": seconds, "forwards": self._forwards}

    def vanilla(self) -> Generate:
        """LLaDA's sampler on the model file of Hugging Face."""
        model, generate = self._load(self._hugging_face()), self._module("llada", "generate").generate
        return lambda ids, request: generate(model, ids, **self._common(request))

    def fast_plain(self) -> Generate:
        """Fast-dLLM without a cache."""
        return self._fast("generate")

    def fast_prefix(self) -> Generate:
        """Fast-dLLM's prefix cache."""
        return self._fast("generate_with_prefix_cache")

    def fast_dual(self) -> Generate:
        """Fast-dLLM's dual cache."""
        return self._fast("generate_with_dual_cache")

    def _fast(self, function: str) -> Generate:
        module = self._module("fastdllm/llada", "generate")
        model, generate = self._load(module.LLaDAModelLM), getattr(module, function)
        return lambda ids, request: generate(model, ids, **self._common(request))[0]

    def dllm_cache(self) -> Generate:
        """dLLM-Cache, which hooks into the model file of Hugging Face."""
        model = self._load(self._hugging_face())
        cache = self._module("dllmcache", "dllm_cache.cache").dLLMCache
        hooks = importlib.import_module("dllm_cache.hooks.cache_hook_LLaDA")
        generate = importlib.import_module("utils.generate_function").generate
        cache.new_instance()
        hooks.register_cache_LLaDA(model, "model.transformer.blocks")

        def answer(ids: torch.Tensor, request: Request) -> torch.Tensor:
            common = self._common(request | {"options": {}})
            cache.new_instance(**request["options"])
            return torch.cat([ids, generate(ids, torch.ones_like(ids), model, **common)], dim=1)

        return answer

    def dkv_decode(self) -> Generate:
        """dKV-Cache-Decode."""
        module = self._module("dkv", "generation_utils.llada_dkv_cache_decode")
        model = self._load(module.LLaDAModelLM)
        return lambda ids, request: module.generate(model, None, ids, **self._common(request), enable_cache=True)

    def polestar(self) -> Generate:
        """Polestar, with only the modules of its package that LLaDA needs."""
        self._package("polestar_llada", "polestar/src/polestar/models/llada")
        generate = importlib.import_module("polestar_llada.generation").generate_with_dual_cache
        model = self._load(importlib.import_module("polestar_llada.modeling_llada").LLaDAModelLM)
        # One token a step is a threshold that the best token alone passes: without one the code fails if a selected
        # cluster has masks of a later block.
        one = {"threshold": 2.0, "threshold_early": None}
        return lambda ids, request: generate(model, ids, **(one | self._common(request)))[0]

    def _common(self, request: Request) -> dict[str, Any]:
        """Arguments with the same name in all of them. A threshold is passed only if it is given: some refuse it."""
        own = {"threshold": request["threshold"], "threshold_early": request["early"]}
        length = {"steps": request["steps"], "gen_length": request["length"], "block_length": request["block"]}
        given = {name: value for name, value in own.items() if value is not None}
        return length | given | {"mask_id": self._mask} | request["options"]

    def _module(self, folder: str, name: str) -> Any:
        sys.path.insert(0, str(self._code / folder))
        return importlib.import_module(name)

    def _package(self, name: str, folder: str) -> None:
        """Register the package of a folder without its __init__, which imports more than is needed."""
        module = types.ModuleType(name)
        module.__path__ = [str(self._code / folder)]
        sys.modules[name] = module

    def _hugging_face(self) -> Any:
        """The model file that is published with the weights."""
        self._package("hugging_face", "dllm/dllm/pipelines/llada/models")
        module: Any = importlib.import_module("hugging_face.modeling_llada")
        inner = module.LLaDAModel

        def on_cpu(config: Any, **options: Any) -> Any:
            config.init_device = "cpu"
            return inner(config, **options)

        module.LLaDAModel = on_cpu
        return module.LLaDAModelLM

    def _load(self, kind: Any) -> Any:
        model = kind.from_pretrained(str(self._checkpoint), torch_dtype=torch.float32).eval()

        def count(*_: Any) -> None:
            self._forwards += 1

        model.register_forward_pre_hook(count)
        return model


def serve(load: Callable[[], dict[str, Any]], answer: Callable[[Request], dict[str, Any]], hidden: str) -> None:
    """Write the result of `load`, then answer until stdin ends. The folder `hidden` stands in no error."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints go to stderr

    def say(make: Callable[[], dict[str, Any]]) -> None:
        try:
            told = make()
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".replace(f"{hidden}{os.sep}", "")
            told = {"failed": why.splitlines()[0]}
        said.write(json.dumps(told) + "\n")

    say(load)
    for line in sys.stdin:
        say(lambda line=line: answer(json.loads(line)))


def main() -> None:
    """Serve the implementation that the command line names."""
    name, code, checkpoint, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    implementations = Implementations(Path(code), Path(checkpoint))
    serve(lambda: implementations.load(name), implementations.answer, code)


if __name__ == "__main__":
    main()
