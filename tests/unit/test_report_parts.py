"""Thinning of curves, redaction and the words of a report's summary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.observability.redact import REDACTED, redact_text, redact_tree
from rlhf_megatron.observability.report_phases import phase_color, phase_order
from rlhf_megatron.observability.report_samples import spread
from rlhf_megatron.observability.report_summary import duration
from rlhf_megatron.observability.thinning import rule_of, thin

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(VALUES, st.integers(1, 40), st.sampled_from(["reward/mean", "grad_norm/actor"]))
def test_thinned_curves_keep_what_they_say(values, most, key):
    steps = [3 * i + 1 for i in range(len(values))]
    found = thin(steps, values, most=most, key=key)
    assert len(found.steps) == len(found.values) <= most
    assert found.steps[-1] == steps[-1]
    size = found.bucket_steps
    for number, value in enumerate(found.values):
        part = [v for v in values[number * size : (number + 1) * size] if v is not None]
        assert found.steps[number] == steps[min((number + 1) * size, len(steps)) - 1]
        if not part:
            assert value is None
        elif rule_of(key) == "largest":
            assert value == max(part)
        else:
            assert value == pytest.approx(sum(part) / len(part))
    if len(values) <= most:
        assert found.values == values


@given(st.lists(st.integers(), max_size=50), st.integers(1, 20))
def test_spread_takes_the_ends_and_keeps_the_order(items, most):
    numbered = list(enumerate(items))
    found = spread(numbered, most=most)
    assert len(found) == min(len(items), most) == len(set(found))
    assert found == sorted(found, key=lambda pair: pair[0])
    if len(found) > 1:
        assert (found[0], found[-1]) == (numbered[0], numbered[-1])


SECRET_KEYS = ["password", "api_key", "apiKey", "hf_token", "token", "client-secret"]
SECRET_KEYS += ["credentials", "Authorization", "aws_secret_access_key", "private_key"]


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_keys_that_name_secrets(key):
    tree = {"reward": {key: "sesame", "deep": [{key: {"inner": ["sesame"]}}]}}
    assert "sesame" not in str(redact_tree(tree))
    assert tree["reward"][key] == "sesame"  # a copy


@pytest.mark.parametrize(
    "key", ["max_response_tokens", "stop_tokens", "tokenizer", "micro_batch_tokens", "author"]
)
def test_keys_that_only_sound_like_it(key):
    assert redact_tree({key: ["</s>", "some text"], "n": 3}) == {key: ["</s>", "some text"], "n": 3}


def test_what_is_hidden_already_stays():
    tree = {"api_key": "${oc.env:API_KEY}", "token": "***"}
    assert redact_tree(tree) == tree


def test_numbers_stay_also_below_a_secret_name():
    assert redact_tree({"token": 5, "secret": None}) == {"token": 5, "secret": None}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://me:sesame@host/path", "host/path"),
        ("Authorization: Bearer sesame-sesame", "Authorization"),
        ("key hf_sesamesesame in use", "in use"),
        ("https://host/score?api_key=sesame&n=3", "&n=3"),
        ('{"password": "sesame"}', "password"),
    ],
)
def test_values_that_look_like_secrets(text, kept):
    found = redact_text(text)
    assert "sesame" not in found and kept in found and REDACTED in found


@pytest.mark.parametrize(
    "text", ["https://host:8000/score", "runs/first", "12 tokens: 5", "a sk-y, an hf_x", "hf"]
)
def test_texts_without_secrets_stay(text):
    assert redact_text(text) == text


def test_phases_keep_the_order_of_a_step():
    shuffled = ["update_actor", "checkpoint", "rollout", "offload_actor", "log_prob", "warmup"]
    assert phase_order(shuffled) == [
        "warmup",
        "rollout",
        "log_prob",
        "update_actor",
        "offload_actor",
        "checkpoint",
    ]
    assert phase_color("offload_actor") == phase_color("offload_actor")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1234, "0.12 s"),
        (59.0, "59 s"),
        (61, "1 min 1 s"),
        (3661, "1 h 1 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
