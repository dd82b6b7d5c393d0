"""The OpenAPI document of the server: the same limits that the routes check."""

from typing import Any

from vlhmm.server.limits import Limits

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}


def document(version: str, limits: Limits, vocab_size: int, needs_key: bool) -> Schema:
    """Return the OpenAPI 3.1 document."""
    model = {"type": "string", "description": "without effect: there is one model"}
    paths: Schema = {
        "/health": {"get": _get("Whether the server answers")},
        "/metrics": {"get": _get("Counters in Prometheus' text format", content="text/plain")},
        "/openapi.json": {"get": _get("This document")},
        "/v1/models": {"get": _get("The one model that is served")},
        "/v1/models/{model}": {"get": _get("The model by its name", [_path("model", _TEXT)])},
        "/tokenizer_info": {"get": _get("Special tokens and the size of the vocabulary")},
        "/v1/summary": {"get": _get("Sizes, the most used states, blocks and words", [_top(20)], computed=True)},
        "/v1/map": {"get": _get("The block-by-block transition matrix", computed=True)},
        "/v1/states/{state}": {
            "get": _get("What a state stands for", [_path("state", _integer(0)), _top()], computed=True)
        },
        "/v1/words/{word}": {
            "get": _get("Where a word comes from", [_path("word", _TEXT), _top()], computed=True)
        },
        "/v1/blocks/{block}": {
            "get": _get("What a block stands for", [_path("block", _integer(0)), _top()], computed=True)
        },
        "/tokenize": {
            "post": _post(
                "Ids of a text",
                _request({"model": model, "prompt": _TEXT, "add_special_tokens": _BOOLEAN}, "prompt"),
            )
        },
        "/detokenize": {
            "post": _post("Text of ids", _request({"model": model, "tokens": _ids(vocab_size)}, "tokens"))
        },
        "/v1/completions": {"post": _post("Complete, fill or score texts", _completion(limits, vocab_size))},
        "/v1/score": {
            "post": _post("Log-probability of every token", _request({"text": _TEXT, "eos": _BOOLEAN}, "text"))
        },
        "/v1/next": {
            "post": _post(
                "The exact distribution of the next word",
                _request({"context": _TEXT, "top_k": _integer(1, max(1000, vocab_size))}),
            )
        },
        "/v1/posteriors": {
            "post": _post(
                "Surprisals, words expected given both sides, state posteriors, the best path",
                _request(
                    {
                        "text": {"type": "string", "pattern": r"\S"},
                        "eos": _BOOLEAN,
                        "top_k": _integer(1, limits.logprobs),
                        "num_states": _integer(1, limits.logprobs),
                    },
                    "text",
                ),
            )
        },
        "/v1/infill": {"post": _post("Fill the gaps of a template, exactly", _infill(limits))},
    }
    for path, answer in _answers().items():
        for operation in paths[path].values():
            operation["responses"]["200"]["content"]["application/json"]["schema"] = answer
    stopping = {"description": "The server is stopping", "content": {"application/json": {"schema": _answers()["/health"]}}}
    health = paths["/health"]["get"]
    health["responses"] = {"200": health["responses"]["200"], "503": stopping} | _refusals("403")
    found: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "vlhmm", "version": version, "description": "A hidden Markov language model, exactly."},
        "paths": paths,
        "components": {"schemas": {"Error": _error()}},
    }
    if needs_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        health["security"] = []
        for operations in paths.values():
            for operation in operations.values():
                operation["responses"] |= {} if operation is health else _refusals("401")
    return found


def _answers() -> dict[str, Schema]:
    """Return the schemas of the answers."""
    number, text, whole = {"type": "number"}, {"type": "string"}, {"type": "integer"}
    log_prob = {"type": ["number", "null"], "description": "nats; null for probability zero"}
    word = _whole({"word": text, "probability": number})
    logprobs = {"type": ["object", "null"]}
    choice = _whole({"index": whole, "text": text, "logprobs": logprobs, "finish_reason": {"type": ["string", "null"]}})
    usage = _whole({"prompt_tokens": whole, "completion_tokens": whole, "total_tokens": whole})
    examples = _list(_whole({"words": _list(text), "places": _list(whole)}))
    state = _whole({"state": whole, "probability": number, "words": _list(text)})
    block = _whole({"block": whole, "probability": number, "words": _list(text)})
    around = {
        "next_words": _list(word),
        "next_states": _list(state),
        "next_blocks": _list(block),
        "previous_words": _list(word),
        "previous_states": _list(state),
        "previous_blocks": _list(block),
        "examples": examples,
    }
    used = {"usage": number, "usage_rank": whole, "num_words": whole, "words": _list(word)}
    place = _whole(
        {"word": text, "log_prob": log_prob, "path_state": whole, "states": {"type": "array"}, "expected": _list(word)}
    )
    model = _whole({"id": text, "object": {"const": "model"}, "created": whole, "vocab_size": whole})
    special = _whole(
        {"bos_token": text, "bos_token_id": whole, "eos_token": text, "eos_token_id": whole, "vocab_size": whole}
    )
    answer = {"id": text, "object": {"const": "text_completion"}, "created": whole, "model": text}
    return {
        "/health": _whole({"status": {"enum": ["ok", "stopping"]}}),
        "/openapi.json": _whole({"openapi": text, "paths": {"type": "object"}}),
        "/v1/models": _whole({"object": {"const": "list"}, "data": _list(model)}),
        "/v1/models/{model}": model,
        "/tokenizer_info": special,
        "/tokenize": _whole({"tokens": _list(whole), "count": whole, "max_model_len": whole, "oov": whole}),
        "/detokenize": _whole({"prompt": text}),
        "/v1/completions": _whole(answer | {"choices": _list(choice), "usage": usage}),
        "/v1/score": _whole(
            {"text": text, "log_prob": log_prob, "num_tokens": whole, "oov": whole, "tokens": {"type": "array"}}
        ),
        "/v1/next": _whole({"context": text, "eos": text, "oov": whole, "entropy": number, "words": _list(word)}),
        "/v1/posteriors": _whole({"text": text, "log_prob": log_prob, "path_log_prob": number, "places": _list(place)}),
        "/v1/infill": _whole(
            {"template": text, "mode": text, "log_evidence": log_prob, "constraint_log_prob": log_prob}
        ),
        "/v1/summary": _whole(
            {"num_states": whole, "vocabulary_size": whole, "states": _list(state), "words": _list(word)}
        ),
        "/v1/map": _whole({"blocks": {"type": "array"}, "matrix": _list(_list(number))}),
        "/v1/states/{state}": _whole({"state": whole} | used | around),
        "/v1/blocks/{block}": _whole({"block": whole, "states": _list(state)} | used | around),
        "/v1/words/{word}": _whole(
            {"word": text, "id": whole, "frequency": number, "states": {"type": "array"}, "examples": examples}
        ),
    }


def _whole(properties: Schema) -> Schema:
    return _object(properties, *properties)


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _get(
    summary: str,
    parameters: list[Schema] | None = None,
    content: str = "application/json",
    computed: bool = False,
) -> Schema:
    schema: Schema = {"type": "object"} if content == "application/json" else {"type": "string"}
    answers = {"200": {"description": "The answer", "content": {content: {"schema": schema}}}}
    in_path = any(parameter["in"] == "path" for parameter in parameters or [])
    refusals = ["403", *(["404"] if in_path else []), *(["400", "429", "503", "504"] if computed else [])]
    return {"summary": summary, "parameters": parameters or [], "responses": answers | _refusals(*refusals)}


def _post(summary: str, schema: Schema) -> Schema:
    answer = {"description": "The answer", "content": {"application/json": {"schema": {"type": "object"}}}}
    if "stream" in schema["properties"]:
        answer["content"]["text/event-stream"] = {"schema": {}}  # type: ignore[index]
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer} | _refusals("400", "403", "404", "408", "413", "429", "503", "504"),
    }


def _refusals(*statuses: str) -> Schema:
    """Return the error answers of these statuses, in OpenAI's form."""
    reasons = {
        "400": "The request does not fit the model or the limits",
        "401": "The API key is missing or wrong",
        "403": "The server binds 127.0.0.1 and was asked under another name",
        "404": "There is no such thing",
        "408": "The body did not arrive in time",
        "413": "The body is too large",
        "429": "Too many requests at once; Retry-After says when",
        "503": "The server is stopping, or the model is still being looked through; Retry-After says when",
        "504": "The answer took too long",
    }
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": reasons[status], "content": content} for status in sorted(set(statuses))}


def _error() -> Schema:
    null_text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": null_text, "code": null_text}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type"], "properties": fields}},
    }


def _completion(limits: Limits, vocab_size: int) -> Schema:
    ids = _ids(vocab_size)
    several = {"minItems": 1, "maxItems": limits.prompts}
    prompt = {
        "description": "A text, several texts, ids, or several lists of ids",
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, **several},
            ids | {"minItems": 1},
            {"type": "array", "items": ids, **several},
        ],
    }
    structured = {
        "type": ["object", "null"],
        "description": "What the completion must be: a regular expression, one of some texts, or JSON of a schema (subword models)",
        "properties": {
            "regex": {"type": "string", "maxLength": limits.regex_chars},
            "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            "json": {"type": ["object", "string"]},
        },
        "minProperties": 1,
        "maxProperties": 1,
    }
    return _request(
        {
            "model": {"type": "string"},
            "prompt": prompt,
            "suffix": {"type": ["string", "null"], "description": "What comes after the completion; answered exactly"},
            "max_tokens": _integer(0, limits.max_tokens, "default 16"),
            "min_tokens": _integer(0, limits.gap_words, "least words between prompt and suffix"),
            "temperature": _number(0, 100),
            "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "n": _integer(1, limits.n),
            "seed": _integer(-(1 << 63), (1 << 63) - 1),
            "stop": _strings(4),
            "logprobs": _integer(0, limits.logprobs) | {"type": ["integer", "null"]},
            "echo": _BOOLEAN,
            "stream": _BOOLEAN,
            "stream_options": {
                "type": ["object", "null"],
                "properties": {"include_usage": _BOOLEAN},
                "description": "include_usage: a last event with the numbers of tokens",
            },
            "structured_outputs": structured,
            "best_of": _integer(1, limits.n, "must equal n: draws are exact"),
            "frequency_penalty": {"enum": [0, None], "description": "not supported"},
            "presence_penalty": {"enum": [0, None], "description": "not supported"},
            "logit_bias": {"type": ["object", "null"], "maxProperties": 0, "description": "not supported"},
            "user": {"type": ["string", "null"], "description": "without effect"},
        }
    )


def _infill(limits: Limits) -> Schema:
    return _request(
        {
            "template": {
                "type": "string",
                "pattern": r"\[MASK(:[0-9]+(-[0-9]+)?)?\]",
                "description": "Words and gaps: [MASK], [MASK:n], [MASK:a-b]",
            },
            "mode": {"enum": ["sample", "best", "marginals"]},
            "n": _integer(1, limits.n),
            "seed": _integer(-(1 << 63), (1 << 63) - 1),
            "top_k": _integer(1, limits.logprobs),
            "stream": _BOOLEAN,
            "eos": _BOOLEAN,
            "allow_eos": _BOOLEAN,
            "scope": {"enum": ["text", "gaps"]},
            "must_contain": _strings(16),
            "must_not": _strings(16),
            "in_order": _BOOLEAN,
            "regex": _strings(8),
            "length": {
                "type": "array",
                "items": _integer(0, limits.gap_words * 16) | {"type": ["integer", "null"]},
                "minItems": 1,
                "maxItems": 2,
                "description": "Least and most words of the text; null for no limit",
            },
        },
        "template",
    )


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _request(properties: Schema, *required: str) -> Schema:
    """Return the schema of a body that allows no other fields."""
    return _object(properties, *required) | {"additionalProperties": False}


def _integer(low: int, high: int | None = None, description: str | None = None) -> Schema:
    found: Schema = {"type": "integer", "minimum": low}
    if high is not None:
        found["maximum"] = high
    return found | ({"description": description} if description else {})


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _strings(most: int) -> Schema:
    one = {"type": "string", "minLength": 1}
    return {"anyOf": [one, {"type": "array", "items": one, "maxItems": most}]}


def _ids(vocab_size: int) -> Schema:
    return {"type": "array", "items": _integer(0, vocab_size)}


def _path(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _top(default: int = 10) -> Schema:
    return {"name": "top", "in": "query", "required": False, "schema": _integer(1, 100) | {"default": default}}
