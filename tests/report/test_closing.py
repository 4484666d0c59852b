"""The closing summary by hand."""

from trace_jax.report import closing


def step(number, ratio, **more):
    costs = {"generated_tokens": 600, "cached_tokens": 300, "prefilled_tokens": 100, "budget_units": 8.0}
    row = {"step": number, "rollout/effective_ratio": ratio, "rollout/success": 0.5, "time/step": 1.5}
    return row | {f"rollout/{name}": value for name, value in costs.items()} | more


def evaluation(success, error, easy):
    return {"eval/success": success, "eval/standard_error": error, "eval/success_1": easy}


def test_summary_by_hand():
    rows = [{"step": 0} | evaluation(0.25, 0.01, 0.5), step(1, 0.2), step(2, 0.4), step(3, 0.9)]
    rows[-1] |= evaluation(0.5, None, 0.75)
    lines = [line.split() for line in closing.summary(rows, "8 prompts x 2").splitlines()]
    assert ["held-out", "success", "(8", "prompts", "x", "2)", "0.250", "±", "0.010", "0.500"] in lines
    assert ["difficulty", "1", "0.500", "0.750"] in lines
    # Thirds of three steps are one step each.
    assert ["effective", "ratio", "(first", "and", "last", "1", "steps)", "0.20", "0.90"] in lines
    text = closing.summary(rows, "")
    # 3 x 1.5 s is 4.5, which rounds to even; 3 x 8 units; 3 x 600 tokens; 300 of 400 history tokens cached.
    assert "3 steps in 4 s: 24 budget units, 1,800 tokens" in text and "75% of the histories' tokens" in text


def test_nothing_to_say_without_steps_or_without_an_evaluation():
    assert closing.summary([{"step": 0} | evaluation(0.25, 0.01, 0.5)], "") == ""
    assert closing.summary([step(1, 0.5)], "") == ""
