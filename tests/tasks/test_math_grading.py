r"""The grader against a table of equivalences made by hand, hostile answers, dying workers, and real answers."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests import real_data
from trace_jax.tasks.math import answers, checker, grading

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
SETS = ("aime24", "amc", "math500", "minerva", "olympiadbench", "math_train")


@pytest.fixture(scope="module")
def grader():
    with grading.Grader(workers=2, deadline=10.0) as found:
        yield found


# answer | truth | equal
TABLE = r"""
1/2 | \frac{1}{2} | yes
0.5 | \frac12 | yes
1.5 | 1\frac{1}{2} | yes
0.333333 | 1/3 | yes
0.33 | 1/3 | no
1.41421356 | \sqrt{2} | yes
1.414 | \sqrt{2} | no
\frac{1}{\sqrt3} | \frac{\sqrt{3}}{3} | yes
204.0 | 204 | yes
205 | 204 | no
10080 | 10,\!080 | yes
58500 | 58,500 | yes
32348 | \$32,\!348 | yes
4.5 \times 10^{33} | 4.5e33 | yes
1e-5 | 1 \times 10^{-5} | yes
2e-5 | 1 \times 10^{-5} | no
0.0 | \dfrac{1}{29,\!322,\!216} | no
0.0000671 | \frac{672}{10000000} | no
0.0000672 | \frac{672}{10000000} | yes
½ | \frac12 | yes
3π/2 | \frac{3\pi}{2} | yes
90 | 90^\circ | yes
90 \text{ degrees} | 90^\circ | yes
17 | 17\% | yes
0.17 | 17\% | yes
864 | 864 \mbox{ inches}^2 | yes
8.24 | \approx 8.24 \text{ mph} | yes
20 | 20\text{ miles} | yes
6 \text{ m} | 6 | yes
6m | 6 | yes
6 | 6m | no
2 | 2t | no
\frac{t}{m} | \frac{1}{m}t | yes
2 | \hbar \omega(v+1 / 2)-\frac{E_{0}^{2} e^{2}}{2 m \omega^{2}} | no
7,5,3 | 3, 5, 7 | yes
\{3,5,7\} | 3,5,7 | yes
3,5 | 3,5,7 | no
3,5,8 | 3,5,7 | no
2, 3, 4 | 2, 3, \text{ and } 4 | yes
5, 7 | 5\text{ or }7 | yes
5 | 5\text{ or }7 | no
1 + \sqrt{19}, 1 - \sqrt{19} | 1 \pm \sqrt{19} | yes
(2,3) | (3,2) | no
(4,5,7),(1,8,19) | (1,8,19), (4,5,7) | yes
(1,8,19) | (1,8,19), (4,5,7) | no
[3,4] | (3,4] | no
(3,4) | (3,4] | no
x>2 | (2,\infty) | yes
3 < x \le 4 | (3,4] | yes
(3, \infty) \cup (-\infty, 2) | (-\infty, 2) \cup (3, \infty) | yes
5 | x=5 | yes
x=6 | x=5 | no
y=3+2x | y = 2x + 3 | yes
5x - 7y + 11z = -4 | 5x - 7y + 11z + 4 = 0 | yes
(x+5)(y+2) | xy+2x+5y+10 | yes
x^2+1 | x^2+2 | no
-5i+6 | 6 - 5i | yes
\begin{bmatrix} -1/3 \\ 2/3 \end{bmatrix} | \begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix} | yes
\begin{pmatrix} -1 & 0 \\ 0 & 1 \end{pmatrix} | \begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix} | no
52_{8} | 52_8 | yes
53_8 | 52_8 | no
1:3 | 3:1 | no
Evelyn | \text{Evelyn} | yes
Angela | \text{Evelyn} | no
MR=SRMC | SRAC=LRAC | no
東京 | \text{Tokyo} | no
 | 5 | no
? | 5 | no
"""


def test_what_is_equal_and_what_is_not(grader):
    wrong = []
    for line in TABLE.strip("\n").splitlines():
        answer, truth, equal = (part.strip() for part in line.rsplit(" | ", 2))
        if grader.equal(answer, truth) is not (equal == "yes"):
            wrong.append(line)
    assert not wrong


def test_quick_comparisons_agree_with_math_verify(grader):
    """Numbers are compared without the library; the library is the oracle."""
    values = ["7", "7.0", "-7", "07", "1,007", "1007", "0.25", ".25", "0.2500004", "0.2501", r"25 \times 10^{-2}", "8"]
    for answer in values:
        for truth in values:
            a, b = answers.plain(answer), answers.plain(truth)
            assert answers.quick(a, b) is grader._compare(a, b, True), (answer, truth)


def test_an_answer_without_a_box(grader):
    assert grader.stated(r"Adding up, the final answer is $\frac{3}{6}$.", r"\frac12")
    assert grader.stated("First 7, then 9. The answer is 0.5", r"\frac12")
    assert not grader.stated("First 0.5. The answer is 7.", r"\frac12")
    assert not grader.stated("I do not know.", r"\frac12")
    assert not grader.stated("  ", r"\frac12")
    assert not grader.stated("The answer is 0.5. " + "la " * grading.MAX_TEXT, "0.5")  # only the end is read
    assert grader.stated("x" * 1_000_000 + " so the answer is $7$.", "7")


HOSTILE = (
    "10^{10^{10}}",
    "9^{9^{9^9}}",
    "100000000!",
    r"\sum_{n=1}^{10^9} n^{n}",
    r"\binom{10^{10}}{10^9}",
    "(" * 480 + "1" + ")" * 480,
    "{" * 900,
    r"\frac{1}{" * 80 + "2" + "}" * 80,
    r"\sqrt{" * 120 + "2" + "}" * 120,
    "1+" * 450 + "1",
    "\\" * 999,
    "𝔸" * 500,
    "\x00\ud800",
    "__import__('os').system('true')",
)


def test_hostile_answers_are_wrong_in_bounded_time():
    """Each takes at most its deadline, and two workers share them; the pool works afterwards."""
    deadline = 0.5
    with grading.Grader(workers=2, deadline=deadline) as grader:
        results = {}
        judge = lambda text: results.update({text: grader.equal(text, "7")})
        threads = [threading.Thread(target=judge, args=(text,)) for text in HOSTILE]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == dict.fromkeys(HOSTILE, False)
        # Half of them a worker. A killed worker's successor comes within the pool's round of 0.1 s; 1 s on busy cores.
        assert time.monotonic() - start < len(HOSTILE) / 2 * (deadline + 1.0)
        assert grader.counts["timeout"] >= 3
        assert not grader.equal("1" * 10**6, "7") and grader.counts["oversized"] == 1
        assert grader.equal("(x+1)(x-1)", "x^2-1")


def processes(grader: grading.Grader) -> list[int]:
    return list(grader._pool._pool_manager.worker_manager.workers)


def test_a_comparison_whose_worker_dies_costs_its_own_answer_only():
    with grading.Grader(workers=1, deadline=30.0) as grader:
        found = []
        thread = threading.Thread(target=lambda: found.append(grader.equal("10^{10^{10}}", "7")))
        thread.start()
        while not any(task.worker_id for task in list(grader._pool._pool_manager.task_manager.tasks.values())):
            time.sleep(0.02)
        os.kill(processes(grader)[0], signal.SIGKILL)
        thread.join(10.0)
        assert found == [False] and grader.counts == {"died": 1}
        assert grader.equal("x(x+1)", "x^2+x")


def test_a_comparison_that_raises_is_wrong_and_counted(grader, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(checker, "equal", json.loads)  # called with four strings and numbers: TypeError in the worker
        assert not any(grader.equal("x+1", "1+x") for _ in range(11))
    assert grader.counts["error"] == 11
    told = "grader: {} answers count as wrong because their comparison ended so: error".format
    assert [record.getMessage() for record in caplog.records] == [told(1), told(10)]
    assert grader.equal("x+1", "1+x")  # failures are not remembered


def test_a_pool_whose_idle_worker_was_killed_is_replaced(grader):
    os.kill(processes(grader)[0], signal.SIGKILL)
    time.sleep(0.3)  # the pool looks after its workers every 0.1 s
    assert grader.equal("x(x+2)", "x^2+2x")
    assert grader.counts["restarted"] == 1


def test_a_grader_that_nobody_holds_is_closed():
    grader = grading.Grader(workers=1, deadline=10.0)
    assert grader.equal("x(x+4)", "x^2+4x")
    (worker,) = processes(grader)
    assert Path(f"/proc/{worker}").exists()
    del grader
    gc.collect()
    try:
        assert "Z" in Path(f"/proc/{worker}/stat").read_text()  # ended, and not yet waited for
    except OSError:
        pass  # gone


def test_workers_are_limited():
    with grading.Grader(workers=1, deadline=10.0) as grader:
        run = lambda *task: grader._pool.schedule(*task).result(10)
        assert run(resource.getrlimit, (resource.RLIMIT_AS,)) == (2 << 30, 2 << 30)
        assert run(resource.getrlimit, (resource.RLIMIT_CORE,)) == (0, 0)
        with pytest.raises(MemoryError):
            run(bytes, (3 << 30,))
        assert not grader.equal("x+3", "x+4")
        # Processor time of a comparison: its deadline of 10 s beyond what its worker had used, under 3 s, rounded up.
        assert 11 <= run(resource.getrlimit, (resource.RLIMIT_CPU,))[0] <= 14


def test_repeated_pairs_are_remembered(grader):
    before = grader.counts["compared"]
    assert [grader.equal("z(z+3)", "z^2+3z") for _ in range(3)] == [True] * 3
    assert grader.counts["compared"] == before + 1


def test_threads_share_a_grader(grader):
    results = {}

    def work(i):
        results[i] = grader.equal(f"(x+{i})(x-1)", f"x^2+{i - 1}x-{i + i % 2}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: i % 2 == 0 for i in range(2, 14)}


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from trace_jax.tasks.math import grading\ngrading.Grader(workers=1)\n")
    done = subprocess.run([sys.executable, script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "must guard its own code" in done.stderr


@pytest.mark.parametrize("settings", [{"workers": 0}, {"deadline": 0.0}, {"deadline": float("nan")}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match="use at least 1"):
        grading.Grader(**settings)


def test_the_library_is_loaded_by_the_workers_alone():
    code = textwrap.dedent("""
        import sys
        from trace_jax.tasks.math import family, grading
        assert not {"sympy", "math_verify", "jax"} & set(sys.modules)
    """)
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, timeout=60)


def real_answers(folder: Path, name: str) -> list[str]:
    records = json.loads((folder / f"{name}.json").read_text())
    listed = [record["answer"][0] if isinstance(record["answer"], list) else record["answer"] for record in records]
    return [str(int(x)) if isinstance(x, float) else x.strip() for x in listed if x]


@pytest.mark.parametrize("name", SETS)
def test_real_answers_are_found_in_a_text_and_equal_to_themselves(grader, name):
    """Every answer in a box is right; of those that are no plain numbers a spread of 24 goes through math-verify."""
    truths = real_answers(real_data.folder(), name)
    assert all(grader.equal(answers.boxed(rf"so \boxed{{{truth}}}."), truth) for truth in truths)
    algebra = sorted({truth for truth in truths if answers.number(answers.plain(truth)) is None}) or truths
    for truth in algebra[:: max(len(algebra) // 24, 1)]:
        assert grader.stated(f"The final answer is ${answers.plain(truth)}$.", truth), truth


def test_neighbouring_real_answers_are_not_equal(grader):
    """Sorted by length, so that like is compared with like; equal keys were made one."""
    truths = {answers.key(answers.plain(truth)): truth for truth in real_answers(real_data.folder(), "math500")}
    algebra = [truth for truth in truths.values() if answers.number(answers.plain(truth)) is None]
    algebra.sort(key=lambda truth: (len(truth), truth))
    same = [pair for pair in zip(algebra[::3], algebra[1::3]) if grader.equal(*pair)]
    assert not same
