"""The HTTP routes, in process: answers equal to the library's and to plain sums, refusals in OpenAI's shape."""

import asyncio
import itertools
import json
import math
import random

import pytest
import torch

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from models import VOCABULARY, small_hmm  # noqa: E402
from vlhmm.baselines.kneser_ney import estimate  # noqa: E402
from vlhmm.data.text import encode  # noqa: E402
from vlhmm.distributions import HMMDistributions  # noqa: E402
from vlhmm.language_model import HMMLanguageModel  # noqa: E402
from vlhmm.mixture import MixtureLanguageModel  # noqa: E402
from vlhmm.server import scoring  # noqa: E402
from vlhmm.server.app import PAGE_FILES, Server  # noqa: E402
from vlhmm.server.limits import Limits  # noqa: E402

WORDS = [word for word in VOCABULARY.words if not word.startswith("<")]
A, B = WORDS[0], WORDS[1]


def make_model(rule: str = "reset") -> HMMLanguageModel:
    hmm, blocks = small_hmm("block-factored", 0, torch.float64)
    with torch.no_grad():
        return HMMLanguageModel(VOCABULARY, HMMDistributions(hmm.potentials(), blocks), rule)


MODEL = make_model()


class Client:
    """Sends requests to an app that runs in this process, each call with its own event loop."""

    def __init__(self, **settings) -> None:
        self.settings = {"model": MODEL, "name": "tiny"} | settings

    def several(self, *calls, headers=None, **settings):
        async def run():
            server = Server(**self.settings)
            async with server.app.router.lifespan_context(server.app):
                transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
                    return await asyncio.gather(
                        *(client.request(method, path, headers=headers, **more) for method, path, more in calls)
                    )

        return asyncio.run(run())

    def get(self, path, **more):
        return self.several(("GET", path, {}), **more)[0]

    def post(self, path, headers=None, **body):
        return self.several(("POST", path, {"json": body}), headers=headers)[0]

    def complete(self, **body):
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def client():
    return Client()


def log_probs(model, words):
    return [token.log_prob for token in model.token_scores(words, eos=False)]


# ---- completions


@pytest.mark.parametrize("rule", ["reset", "carry"])
def test_echoed_scores_are_the_librarys_and_greedy_is_the_same_float(rule):
    model = make_model(rule)
    prompts = [[VOCABULARY.id_of[A], VOCABULARY.eos, VOCABULARY.id_of[B]], [VOCABULARY.id_of[B]]]
    answer = Client(model=model).complete(prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        logs, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(logs) == len(tops) == len(ids) + 1 and logs[0] is None and tops[0] is None
        state = model.begin()
        for place, token in enumerate(ids):
            expected = state.distribution().probabilities
            if place:
                assert logs[place] == pytest.approx(math.log(expected[token]), abs=1e-9)
                assert logs[place] in tops[place].values()
                assert (logs[place] == max(tops[place].values())) == (expected[token] == expected.max())
            state = state.step(token)
        assert logs[-1] == max(tops[-1].values()) == pytest.approx(math.log(state.distribution().probabilities.max()))


def test_a_start_token_gives_the_first_word_a_score(client):
    bos = client.get("/tokenizer_info").json()["bos_token_id"]
    assert bos == len(VOCABULARY) != 0
    ids = [VOCABULARY.id_of[A], VOCABULARY.id_of[B]]
    for wanted in (0, 1):
        (choice,) = client.complete(prompt=[bos, *ids], max_tokens=0, logprobs=wanted, echo=True)["choices"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(log_probs(MODEL, [A, B]), abs=1e-9)
    assert client.post("/tokenize", prompt="<bos>", add_special_tokens=False).json()["tokens"] == [bos]
    assert client.post("/v1/completions", prompt=[ids[0], bos]).status_code == 400


@pytest.mark.parametrize("prompt", ["", A, [A, f"{A} {B}"], [VOCABULARY.id_of[A]], [[VOCABULARY.id_of[A]], []], None])
def test_every_form_of_prompt_is_continued(client, prompt):
    count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    answer = client.complete(prompt=prompt, n=3, max_tokens=4, seed=5)
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * count))
    assert client.complete(prompt=prompt, n=3, max_tokens=4, seed=5)["choices"] == answer["choices"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_draws_follow_the_models_distribution(client):
    first = [
        (choice["text"].split() or ["<eos>"])[0]
        for seed in range(8)
        for choice in client.complete(prompt=A, n=64, max_tokens=1, seed=seed)["choices"]
    ]
    for word in VOCABULARY.words:
        p = MODEL.next_distribution(A)[word]
        assert abs(first.count(word) / len(first) - p) < 5 * math.sqrt(p * (1 - p) / len(first)) + 1e-9


def test_a_stream_says_what_the_whole_answer_says(client):
    wish = {"prompt": A, "n": 2, "max_tokens": 6, "seed": 3, "logprobs": 0}
    whole = client.complete(**wish)["choices"]
    answer = client.post("/v1/completions", stream=True, stream_options={"include_usage": True}, **wish)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["usage"]["prompt_tokens"] == 1
    texts, logs, ends = ["", ""], [[], []], [None, None]
    for event in map(json.loads, events[:-2]):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        logs[choice["index"]] += choice["logprobs"]["token_logprobs"]
        ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert texts == [choice["text"] for choice in whole]
    assert logs == [choice["logprobs"]["token_logprobs"] for choice in whole]
    assert ends == [choice["finish_reason"] for choice in whole]


def test_a_stop_string_is_cut_off_and_never_streamed(client):
    wish = {"prompt": "", "n": 32, "max_tokens": 12, "seed": 3, "temperature": 1.0}
    plain = client.complete(**wish)["choices"]
    stopped = client.complete(stop=[f"{A} {B}"], **wish)["choices"]
    hit = [choice for choice in plain if f"{A} {B}" in choice["text"]]
    assert hit, "the seed must give a text with the stop string"
    for choice in stopped:
        assert f"{A} {B}" not in choice["text"]
    index = hit[0]["index"]
    assert stopped[index]["finish_reason"] == "stop"
    answer = client.post("/v1/completions", stream=True, stop=[f"{A} {B}"], **wish)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and "[DONE]" not in line]
    text = "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)
    assert text == stopped[index]["text"]


def test_a_suffix_is_answered_with_the_exact_conditional(client):
    answer = client.complete(prompt=A, suffix=B, max_tokens=2, n=32, seed=0)
    names = [word for word in VOCABULARY.words if word != "<eos>"]
    fills = [fill for count in (1, 2) for fill in itertools.product(names, repeat=count)]
    joint = {fill: math.exp(MODEL.score([A, *fill, B], eos=False)) for fill in fills}
    for choice in answer["choices"]:
        expected = joint[tuple(choice["text"].split())] / sum(joint.values())
        assert math.exp(choice["log_prob"]) == pytest.approx(expected, rel=1e-6)


def test_structured_outputs_keep_to_their_pattern(client):
    allowed = [f"{A} {B}", B]
    found = client.complete(prompt=A, structured_outputs={"choice": allowed}, n=32, seed=0)["choices"]
    joint = {text: math.exp(MODEL.score(f"{A} {text}")) for text in allowed}
    for choice in found:
        text = choice["text"].strip()
        assert math.exp(choice["log_prob"]) == pytest.approx(joint[text] / sum(joint.values()), rel=1e-6)
    pattern = client.complete(prompt="", structured_outputs={"regex": f"{A} {B}*"}, n=8, seed=0)["choices"]
    assert all(set(c["text"].split()[1:]) <= {B} and c["text"].split()[0] == A for c in pattern)


# ---- models without hidden states


def make_mixture() -> MixtureLanguageModel:
    lines = [line.split() for line in ("a b c", "b a d", "a a", "e c b a", "c", "d b a c")]
    return MixtureLanguageModel([MODEL, estimate(encode(lines, VOCABULARY), VOCABULARY, 3)], [0.4, 0.6])


def test_a_mixture_scores_predicts_and_completes():
    model = make_mixture()
    client = Client(model=model)
    text = f"{A} {B} {A}"
    scored = client.post("/v1/score", text=text).json()
    assert scored["log_prob"] == pytest.approx(model.score(text), abs=1e-9)
    found = client.post("/v1/next", context=A, top_k=3).json()["words"]
    assert [w["word"] for w in found] == [w.word for w in model.next_word(A, 3)]
    echoed = client.complete(prompt=[text, B], logprobs=2, echo=True, max_tokens=1, temperature=0)["choices"][0]
    logs = [token.log_prob for token in model.token_scores(text, eos=False)]
    assert echoed["logprobs"]["token_logprobs"][1:-1] == pytest.approx(logs[1:], abs=1e-9)
    best = model.next_word(text, 1)[0]
    assert echoed["logprobs"]["token_logprobs"][-1] == pytest.approx(best.log_prob, abs=1e-9)


def test_draws_of_a_mixture_follow_its_distribution():
    model = make_mixture()
    answers = Client(model=model).several(
        *[
            ("POST", "/v1/completions", {"json": {"prompt": [A, B], "n": 64, "max_tokens": 2, "seed": seed}})
            for seed in range(8)
        ]
    )
    choices = [choice for answer in answers for choice in answer.json()["choices"]]
    for prompt, drawn in ((A, lambda i: i < 64), (B, lambda i: i >= 64)):
        first = [(c["text"].split() or ["<eos>"])[0] for c in choices if drawn(c["index"])]
        for word in VOCABULARY.words:
            p = model.next_distribution(prompt)[word]
            assert abs(first.count(word) / len(first) - p) < 5 * math.sqrt(p * (1 - p) / len(first)) + 1e-9


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/infill", {"template": "a [MASK]"}),
        ("/v1/posteriors", {"text": "a"}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["b"]}}),
    ],
)
def test_what_needs_hidden_states_is_refused_to_a_mixture(path, body):
    answer = Client(model=make_mixture()).post(path, **body)
    assert answer.status_code == 400 and "no hidden states" in answer.json()["error"]["message"]


@pytest.mark.parametrize("num_top", [0, 1])
@pytest.mark.parametrize("rule", ["reset", "carry"])
def test_long_and_short_texts_in_one_pass_have_the_librarys_scores(num_top, rule, monkeypatch):
    monkeypatch.setattr(scoring, "_TOKENS_AT_ONCE", 8)
    model = make_model(rule)
    draw = random.Random(3)
    texts = [[draw.randrange(len(VOCABULARY)) for _ in range(length)] for length in (1, 40, 0, 3, 17, 40)]
    for ids, tokens in zip(texts, scoring.score_texts(model, texts, num_top), strict=True):
        state = model.begin()
        assert [token.id for token in tokens] == ids
        for token in tokens:
            assert token.log_prob == pytest.approx(state.distribution().log_prob(VOCABULARY.words[token.id]), abs=1e-9)
            state = state.step(token.id)


def test_scoring_stops_when_nobody_waits():
    calls = []
    with pytest.raises(scoring.GivenUp):
        scoring.score_texts(MODEL, [[2, 3]] * 4, 1, lambda: calls.append(1) is None)
    assert len(calls) == 1


# ---- the library's queries


def test_score_next_posteriors_and_infill_are_the_librarys(client):
    text = f"{A} {B} zzz"
    scored = client.post("/v1/score", text=text).json()
    assert scored["log_prob"] == pytest.approx(MODEL.score(text), abs=1e-9) and scored["oov"] == 1
    found = client.post("/v1/next", context=A, top_k=3).json()["words"]
    assert [(w["word"], w["probability"]) for w in found] == [
        (w.word, pytest.approx(w.probability)) for w in MODEL.next_word(A, 3)
    ]
    known = client.post("/v1/posteriors", text=text).json()
    (path,) = MODEL.decode(text)
    assert [place["path_state"] for place in known["places"]] == list(path.states)
    assert known["log_prob"] == pytest.approx(MODEL.score(text), abs=1e-6)
    template = f"{A} [MASK:1-2]"
    filled = client.post("/v1/infill", template=template, must_contain=B, seed=0, n=4).json()
    ready = MODEL.gaps(template, constraint=__import__("vlhmm").must_contain(B))
    assert filled["constraint_log_prob"] == pytest.approx(ready.log_constraint)
    assert [fill["text"] for fill in filled["fills"]] == [fill.text for fill in ready.sample(4, 0)]
    for mode in ("best", "marginals"):
        assert client.post("/v1/infill", template=template, mode=mode).status_code == 200


def test_a_range_of_words(client):
    template = f"{A} [MASK:1-2]"
    filled = client.post("/v1/infill", template=template, length=[3], seed=0, n=4).json()
    ready = MODEL.gaps(template, constraint=__import__("vlhmm").length(3))
    assert filled["constraint_log_prob"] == pytest.approx(ready.log_constraint)
    assert {len(fill["text"].split()) for fill in filled["fills"]} == {3}
    assert client.post("/v1/infill", template=template, length=[None, 2]).json()["fills"][0]["text"].count(" ") == 1
    for wrong in ([], [1, 2, 3], "3-4", [3, 2], [-1], ["3"], [10**9]):
        answer = client.post("/v1/infill", template=template, length=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "length", wrong


def test_streamed_fills_begin_with_the_constraint(client):
    wish = {"template": f"{A} [MASK:1-2]", "must_contain": B, "seed": 0, "n": 10}
    answer = client.post("/v1/infill", stream=True, **wish)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    first, *rest = map(json.loads, events[:-1])
    assert events[-1] == "[DONE]" and first["fills"] == []
    assert first["constraint_log_prob"] == client.post("/v1/infill", **wish).json()["constraint_log_prob"]
    fills = [fill for part in rest for fill in part["fills"]]
    assert len(fills) == 10 and all(B in fill["text"].split()[1:] or A == B for fill in fills)
    refused = client.post("/v1/infill", template=A, stream=True)
    assert refused.status_code == 400 and "gap" in refused.json()["error"]["message"]


def test_states_words_blocks_and_the_map(client):
    assert client.get("/v1/states/0").json()["state"] == 0
    assert client.get(f"/v1/words/{A}").json()["word"] == A
    assert client.get("/v1/blocks/0").json()["block"] == 0
    found = client.get("/v1/map").json()
    numbers, paths = [b["block"] for b in found["blocks"]], [b["path"] for b in found["blocks"]]
    assert sorted(numbers) == list(range(len(numbers))) and paths == sorted(paths)
    for number, row in zip(numbers, found["matrix"], strict=True):
        assert sum(row) == pytest.approx(1, abs=1e-4)
        view = client.get(f"/v1/blocks/{number}?top=100").json()
        for share in view["next_blocks"]:
            assert row[numbers.index(share["block"])] == pytest.approx(share["probability"], abs=1e-5)
    examples = client.get(f"/v1/words/{A}").json()["examples"]
    assert examples and all(example["words"][place] == A for example in examples for place in example["places"])
    for path in ("/v1/states/999999", "/v1/states/x", "/v1/words/zzz", "/v1/blocks/999"):
        answer = client.get(path)
        assert answer.status_code == 404 and answer.json()["error"]["message"]


def test_tokens_there_and_back(client):
    text = f"{A} {B}\n{A}"
    ids = client.post("/tokenize", prompt=text).json()["tokens"]
    assert ids == [VOCABULARY.id_of[A], VOCABULARY.id_of[B], VOCABULARY.eos, VOCABULARY.id_of[A]]
    written = client.post("/detokenize", tokens=ids).json()["prompt"]
    assert client.post("/tokenize", prompt=written).json()["tokens"] == ids


# ---- refusals, limits, the key


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": [[99999]]}, "prompt"),
        ({"prompt": A, "max_tokens": -1}, "max_tokens"),
        ({"prompt": A, "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": A, "n": 0}, "n"),
        ({"prompt": A, "temperature": "hot"}, "temperature"),
        ({"prompt": A, "top_p": 0}, "top_p"),
        ({"prompt": A, "logprobs": 1000}, "logprobs"),
        ({"prompt": A, "stop": ["a"] * 5}, "stop"),
        ({"prompt": A, "structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"prompt": A, "structured_outputs": {"regex": "(" * 9}}, "structured_outputs"),
        ({"prompt": A, "suffix": B, "temperature": 0.5}, "suffix"),
        ({"prompt": A, "max_token": 3}, "max_token"),
        ({"prompt": A, "frequency_penalty": 1}, "frequency_penalty"),
        ({"prompt": A, "logit_bias": {"1": -100}}, "logit_bias"),
        ({"prompt": A, "best_of": 2}, "best_of"),
    ],
)
def test_a_wrong_field_is_named(client, body, param):
    answer = client.post("/v1/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/infill", {"template": "[MASK:2-1]"}, "template"),
        ("/v1/infill", {"template": "no gap"}, "template"),
        ("/v1/infill", {"template": "[MASK]", "must_contain": "zzz"}, "must_contain"),
        ("/v1/infill", {"template": "[MASK]", "must_contain": A, "must_not": "zzz"}, "must_not"),
        ("/v1/infill", {"template": "[MASK]", "must_contain": A, "regex": "zzz"}, "regex"),
        ("/v1/infill", {"template": "[MASK]", "regex": "("}, "regex"),
        ("/v1/posteriors", {"text": "<bos>"}, "text"),
        ("/v1/completions", {"prompt": A, "structured_outputs": {"choice": ["zzz"]}}, "structured_outputs"),
        ("/v1/completions", {"prompt": A, "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
def test_what_the_library_refuses_names_its_field_too(client, path, body, param):
    answer = client.post(path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("kind, other", [("state", "999"), ("word", "zzz"), ("block", "999")])
def test_a_state_a_word_or_a_block_that_is_not_there_is_named(client, kind, other):
    answer = client.get(f"/v1/{kind}s/{other}")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == kind


def test_a_long_number_among_ids_is_cut_in_the_answer(client):
    answer = client.post("/v1/completions", prompt=[10**400])
    assert answer.status_code == 400 and len(answer.json()["error"]["message"]) < 200


def test_what_is_certain_has_probability_one_and_not_more(client):
    for number in range(20):
        prompt = " ".join(random.Random(number).choices(WORDS, k=9))
        found = client.complete(prompt=prompt, suffix=B, structured_outputs={"choice": [A]}, max_tokens=1)["choices"]
        filled = client.post("/v1/infill", template=f"{prompt} [MASK]", must_contain=A, scope="gaps").json()["fills"]
        assert -1e-5 < found[0]["log_prob"] <= 0 and 0.9999 < filled[0]["probability"] <= 1


@pytest.mark.parametrize("rule", ["reset", "carry"])
def test_a_newline_ends_a_sentence_for_every_route(rule):
    client = Client(model=make_model(rule))
    text = f"<bos> {A} {B}\n{A}"
    score = client.post("/v1/score", text=text).json()
    assert [token["word"] for token in score["tokens"]] == [A, B, "<eos>", A, "<eos>"] and score["oov"] == 0
    known = client.post("/v1/posteriors", text=text).json()
    assert [place["word"] for place in known["places"]] == [A, B, "<eos>", A]
    assert known["log_prob"] == pytest.approx(score["log_prob"], abs=1e-9)
    for context in (text, f"{A}\n", "<bos>"):
        (choice,) = client.complete(prompt=context, max_tokens=1, temperature=0, logprobs=0)["choices"]
        following = client.post("/v1/next", context=context, top_k=1).json()
        assert following["words"][0]["log_prob"] == pytest.approx(choice["logprobs"]["token_logprobs"][0], abs=1e-9)
        assert following["oov"] == 0
    filled = client.post("/v1/infill", template=f"{A}\n[MASK]", mode="best").json()["fills"][0]
    whole = client.post("/v1/score", text=f"{A}\n{filled['gaps'][0]}").json()["log_prob"]
    evidence = client.post("/v1/infill", template=f"{A}\n[MASK]").json()["log_evidence"]
    assert filled["log_prob"] == pytest.approx(whole - evidence, abs=1e-9)


def test_fields_of_openai_that_ask_for_nothing_are_taken(client):
    neutral = {"frequency_penalty": 0, "presence_penalty": None, "logit_bias": {}, "best_of": 1, "user": "me"}
    assert client.complete(prompt=A, max_tokens=2, seed=1, **neutral)["choices"]
    assert "max_tokens" in client.post("/v1/completions", prompt=A, max_token=3).json()["error"]["message"]


def test_a_model_is_found_by_its_name(client):
    assert client.get("/v1/models/tiny").json() == client.get("/v1/models").json()["data"][0] | {
        "created": client.get("/v1/models/tiny").json()["created"]
    }
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert Client(name="org/tiny").get("/v1/models/org/tiny").json()["id"] == "org/tiny"


def test_other_refusals_have_their_status(client):
    assert client.post("/v1/completions", model="other").status_code == 404
    assert client.several(("POST", "/v1/score", {"content": b"\xff{"}))[0].status_code == 400
    assert client.several(("POST", "/v1/score", {"content": b"[" * 100_000}))[0].status_code == 400
    assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403
    small = Client(limits=Limits(body_bytes=100))
    assert small.post("/v1/score", text="a" * 200).status_code == 413


def test_too_many_requests_get_429_and_are_told_when_to_come_back():
    call = ("POST", "/v1/completions", {"json": {"prompt": A, "max_tokens": 50, "n": 8, "temperature": 2}})
    answers = Client(limits=Limits(concurrent=2)).several(*[call] * 12)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and all(answer.headers["Retry-After"] == "1" for answer in refused)
    assert {answer.status_code for answer in answers} == {200, 429}


def test_an_answer_that_takes_too_long_is_given_up():
    slow = Client(limits=Limits(seconds=1e-4))
    assert slow.post("/v1/infill", template=f"{A} [MASK:1-60]").status_code == 504


def test_the_key_is_asked_for():
    locked = Client(api_key="secret")
    assert locked.get("/health").status_code == 200
    assert locked.get("/v1/models").status_code == 401
    assert locked.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert locked.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_concurrent_requests_share_passes_and_keep_their_answers():
    texts = [" ".join(words) for words in itertools.product((A, B), repeat=4)]
    calls = [("POST", "/v1/score", {"json": {"text": text}}) for text in texts]
    *answers, _ = Client().several(*calls, ("GET", "/health", {}))
    for text, answer in zip(texts, answers, strict=True):
        assert answer.json()["log_prob"] == pytest.approx(MODEL.score(text), abs=1e-9)


def test_the_scheduler_scores_what_waits_in_one_pass():
    from vlhmm.server.scheduler import Scheduler, ScoreJob

    scheduler = Scheduler(MODEL)
    jobs = [scheduler.submit(ScoreJob([[i % len(VOCABULARY)]], 0)) for i in range(20)]
    scheduler.start()
    assert all(len(job.future.result(10)) == 1 for job in jobs)
    scheduler.close()
    assert scheduler.score_passes == 1 and scheduler.scored_texts == 20


def test_a_question_that_nobody_waits_for_is_stopped_within_its_products():
    from vlhmm.server.scheduler import CallJob, Scheduler

    scheduler = Scheduler(make_model())
    reached = []

    def call(given_up):
        job.give_up()  # as when the client goes away meanwhile
        reached.append("before")
        scheduler.model.infill(f"{A} [MASK:1-3] {B}")
        reached.append("after")

    job = scheduler.submit(CallJob(call))
    following = scheduler.submit(CallJob(lambda given_up: "answered"))
    scheduler.start()
    assert following.future.result(10) == "answered" and reached == ["before"]
    scheduler.close()


def test_quick_work_is_done_within_a_long_question_and_every_answer_is_right():
    """One long question and many quick ones: these are answered first, and none disturbs another."""
    from vlhmm.server.generation import Generation, Wishes
    from vlhmm.server.scheduler import CallJob, GenerateJob, Priority, Scheduler, ScoreJob
    from vlhmm.server.tokenizer import Tokenizer

    model = make_model()
    template = f"{A} [MASK:1-6] {B}"
    expected = model.infill(template, n=5, seed=3)
    scheduler, order = Scheduler(model), []

    def job(name, call, priority):
        return CallJob(lambda given_up: (call(), order.append(name))[0], priority)

    wishes = Wishes(max_tokens=3, temperature=0.0)
    background = job("background", lambda: model.infill(template, n=5, seed=3), Priority.BACKGROUND)
    waiting = [
        job("long", lambda: model.infill(template, n=5, seed=3), Priority.LONG),
        job("quick", lambda: model.next_word(A, 3), Priority.QUICK),
        ScoreJob([[VOCABULARY.id_of[A]]], 1),
        GenerateJob(Generation(model, [[VOCABULARY.id_of[A]]], 1, wishes, Tokenizer(VOCABULARY))),
    ]

    def first(given_up):
        for each in waiting:  # they come while the first question is being answered
            scheduler.submit(each)
        return background.call(given_up)

    asked = scheduler.submit(CallJob(first, Priority.BACKGROUND))
    scheduler.start()
    assert asked.future.result(20) == expected
    long, quick, scored, drawn = (each.future.result(20) for each in waiting)
    scheduler.close()
    assert order.index("quick") < order.index("background") and order.index("long") < order.index("background")
    assert long == expected and quick == model.next_word(A, 3)
    assert scored[0][0].log_prob == pytest.approx(log_probs(model, [A])[0], abs=1e-9)
    assert drawn.rows[0].tokens


def test_who_asks_about_states_too_early_is_told_to_come_back(monkeypatch):
    import time

    from vlhmm.server import app, explorer

    monkeypatch.setattr(app, "PREPARING_SECONDS", 0.01)
    slow = explorer.usage_of
    monkeypatch.setattr(explorer, "usage_of", lambda *given: (time.sleep(0.2), slow(*given))[1])
    answer = Client().get("/v1/states/0")
    error = answer.json()["error"]
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
    assert error["code"] == "not_ready" and "how much each state is used" in error["message"]


def test_the_document_lists_every_route(client):
    paths = set(client.get("/openapi.json").json()["paths"])
    served = {route.path.replace(":path", "") for route in Server(MODEL, "tiny").app.routes}
    assert served - paths == {"/", *(f"/{name}" for name in PAGE_FILES)} and paths <= served


def test_metrics_count_answers(client):
    answers = client.several(("GET", "/v1/models", {}))
    assert answers[0].status_code == 200
    assert "vlhmm_requests_in_flight 0" in client.get("/metrics").text


def test_the_page_is_served_with_its_policy_and_nothing_else_is(client):
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in page.text.replace("http://www.w3.org", "").split("<body")[0].split("<title>")[0]
    for path in ("/..%2fapp.py", "/app.py", "/%2e%2e/app.py"):
        assert client.get(path).status_code == 404
