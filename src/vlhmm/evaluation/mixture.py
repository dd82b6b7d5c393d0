"""Linear interpolation of language models: a `LanguageModel` made of others, its weights by EM, its run folder.

    p(x_t | x_<t) = sum_i w_i p_i(x_t | x_<t),   w_i >= 0,  sum_i w_i = 1

The sum is computed at every token. The result is a distribution over texts, so scoring, the next word and samples
are exact. It is no HMM: what needs hidden states or both sides of a gap is asked of one of its components.

Where a component gives the text so far probability zero, its prediction is undefined. It is then uniform, 1 / V,
until the next fresh start: the mixture stays a distribution, and EM stays exact.

A mixture's folder is self-contained: `components/` holds a copy of every component's run, which is a run by itself.

    config.json                  format_version, kind "mixture", context, components (name, weight, source, sha256 of its files)
    vocabulary.txt               the vocabulary that all components share
    manifest.json                checksums of config.json and vocabulary.txt
    components/NAME/             a run of vlhmm train or vlhmm baseline, without journal and checkpoint
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlhmm.data.atomic_io import replace_atomically, sha256_of
from vlhmm.data.checked import check_keys, number_in, read_object, text_in
from vlhmm.data.manifest import write_listed
from vlhmm.data.text import Text
from vlhmm.data.vocabulary import Vocabulary
from vlhmm.errors import CheckpointError, ConfigError, DataError
from vlhmm.evaluation.perplexity import Rule, token_log_probs
from vlhmm.evaluation.protocol import LanguageModel
from vlhmm.limits import shortened

KIND = "mixture"
FORMAT_VERSION = 1
_NAME = re.compile(r"[0-9a-f]{16}")  # of a component's folder: never a path
_REMEDY = "restore it, or make it again with vlhmm mix"
MAX_COMPONENTS = 10_000
_WRITTEN_FIRST = ("components", "vocabulary.txt", "manifest.json")  # what a kill may leave without config.json
_NOT_COPIED = ("journal.jsonl", "teacher.txt.gz", "usage.safetensors")  # nothing that loading reads


class MixtureCarry(NamedTuple):
    """The components' states between two calls of `score_batch`."""

    carries: tuple[Any, ...]
    possible: Tensor  # (B, n) bool: the component gave the text so far a positive probability


class Mixture:
    """p(x_t | x_<t) = sum_i w_i p_i(x_t | x_<t), in float64.

    Args:
        components: Language models over one vocabulary.
        weights: One weight per component, at least zero; they are normalized.
        rule: The context rule by which it reads texts, "reset" or "carry".

    Raises:
        ConfigError: The vocabularies differ, or the weights are no distribution.
    """

    def __init__(self, components: Sequence[LanguageModel], weights: Sequence[float], rule: Rule = "reset") -> None:
        check_vocabularies([model.vocabulary for model in components])
        if rule not in ("reset", "carry"):
            raise ConfigError(f"context rule {rule!r} is not known; take reset or carry")
        values = np.asarray(weights, dtype=np.float64)
        values = values / max(1.0, values.max(initial=0.0))  # their sum does not overflow
        if values.shape != (len(components),) or not np.isfinite(values).all() or values.min() < 0 or values.sum() <= 0:
            raise ConfigError(
                f"a mixture of {len(components)} models needs as many weights, at least 0 and not all 0, got {shortened(list(weights))}"
            )
        self.components, self.rule = tuple(components), rule
        self.weights: np.ndarray = values / values.sum()
        self.vocabulary: Vocabulary = components[0].vocabulary

    @property
    def num_parameters(self) -> int | None:
        """The components' parameters; None where one does not count its own."""
        counts = [getattr(model, "num_parameters", None) for model in self.components]
        return None if None in counts else sum(counts)  # type: ignore[arg-type]

    def start(self, batch_size: int) -> MixtureCarry:
        """Return the state before the first token, `batch_size` times."""
        possible = torch.ones(batch_size, len(self.components), dtype=torch.bool)
        return MixtureCarry(tuple(model.start(batch_size) for model in self.components), possible)

    def score_batch(self, tokens: Tensor, lengths: Tensor, carry: MixtureCarry) -> tuple[Tensor, MixtureCarry]:
        """Return log p(x_t | x_<t), float64 (B, T), zero beyond `lengths`; and the state after each row.

        Costs what the components cost.
        """
        log_probs, carry = self.component_scores(tokens, lengths, carry)
        log_weights = torch.from_numpy(_log(self.weights))
        inside = torch.arange(tokens.shape[1]) < lengths.cpu()[:, None]
        return torch.where(inside, torch.logsumexp(log_probs + log_weights, dim=-1), 0.0), carry

    def component_scores(self, tokens: Tensor, lengths: Tensor, carry: MixtureCarry) -> tuple[Tensor, MixtureCarry]:
        """Return log p_i(x_t | x_<t) of every component, float64 (B, T, n), and the state after each row."""
        scored = [
            model.score_batch(tokens, lengths, c) for model, c in zip(self.components, carry.carries, strict=True)
        ]
        log_probs = torch.stack([log_prob.cpu() for log_prob, _ in scored], dim=-1)
        inside = (torch.arange(tokens.shape[1]) < lengths.cpu()[:, None])[..., None]
        # NaN: what a component says after a text it thinks impossible
        met = inside & ~(log_probs > -math.inf)
        before = torch.zeros_like(met)
        before[:, 1:] = met[:, :-1].cumsum(dim=1) > 0
        undefined = inside & (before | ~carry.possible[:, None])
        log_probs = torch.where(undefined, -math.log(len(self.vocabulary)), log_probs)
        carries = tuple(after for _, after in scored)
        return log_probs, MixtureCarry(carries, carry.possible & ~met.any(dim=1))

    def next_word_probabilities(self, carry: MixtureCarry) -> Tensor:
        """Return p(x | text so far) of every word x, float64 (B, V)."""
        total = torch.zeros(len(carry.possible), len(self.vocabulary), dtype=torch.float64)
        for i, (model, after) in enumerate(zip(self.components, carry.carries, strict=True)):
            predicted = model.next_word_probabilities(after).cpu()
            known = carry.possible[:, i : i + 1]
            total += self.weights[i] * torch.where(known, predicted, 1.0 / len(self.vocabulary))
        return total


def check_vocabularies(vocabularies: Sequence[Vocabulary], names: Sequence[str] | None = None) -> None:
    """Raise a ConfigError unless there are models, and all of them have the same words under the same ids."""
    if not vocabularies:
        raise ConfigError("a mixture needs at least one model, got none")
    names = names or [f"model {i + 1}" for i in range(len(vocabularies))]
    for name, vocabulary in zip(names[1:], vocabularies[1:], strict=True):
        if vocabulary.words != vocabularies[0].words:
            raise ConfigError(
                f"{names[0]} and {name} have different vocabularies ({len(vocabularies[0]):,} and {len(vocabulary):,} words), "
                "a mixture needs one; train both on the same text with the same --vocab, --max-vocab and --min-count"
            )


# ---- weights


class FittedWeights(NamedTuple):
    """Weights that EM found, and the mean log-likelihood on the way."""

    weights: np.ndarray  # (n,)
    log_likelihoods: list[float]  # nats per token, before every update and at the end; never falling


def component_log_probs(
    components: Sequence[LanguageModel],
    text: Text,
    rule: Rule = "reset",
    num_streams: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Return log p_i(x_t | x_<t) of every token of a text under every component, (n, T): what EM reads."""
    done, rows = 0, []
    for model in components:
        # A mixture of one knows what is undefined.
        single = Mixture([model], [1.0], rule)
        report = None if progress is None else _from(progress, done, len(components) * text.num_tokens)
        rows.append(token_log_probs(single, text, rule, min(num_streams, text.num_tokens), progress=report))
        done += text.num_tokens
    return np.stack(rows)


def _from(progress: Callable[[int, int], None], first: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: progress(first + done, total)


def fit_weights(log_probs: np.ndarray, tolerance: float = 1e-10, max_iterations: int = 10_000) -> FittedWeights:
    r"""Find the weights that maximize $\sum_t \log \sum_i w_i p_{it}$ by EM.

        w_i <- (1/T) sum_t w_i p_it / sum_j w_j p_jt

    The objective is concave, so that the equal weights of the start lead to the global maximum. It never falls.
    Tokens to which every component gives probability zero have no influence. Each iteration costs O(n T).

    Args:
        log_probs: log p_i(x_t | x_<t), shape (n, T).
        tolerance: EM stops when an iteration gains less than this, in nats per token.
        max_iterations: The largest number of updates.
    """
    count = len(log_probs)
    top = log_probs.max(axis=0)
    log_probs, top = log_probs[:, top > -math.inf], top[top > -math.inf]
    weights = np.full(count, 1.0 / count)
    if not log_probs.shape[1]:
        raise DataError("every token of the text has probability zero under every model; expected a text they can read")
    scaled = np.exp(log_probs - top)
    history: list[float] = []
    for _ in range(max_iterations + 1):
        joint = weights[:, None] * scaled
        total = joint.sum(axis=0)
        history.append(float((np.log(total) + top).mean()))
        if len(history) > max_iterations or (len(history) > 1 and history[-1] - history[-2] < tolerance):
            break
        weights = (joint / total).mean(axis=1)
        weights /= weights.sum()
    return FittedWeights(weights, history)


def mixture_log_probs(log_probs: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return log sum_i w_i p_it, (T,), from the (n, T) log-probabilities of the components."""
    weighted = torch.from_numpy(log_probs) + torch.from_numpy(_log(weights))[:, None]
    return np.asarray(torch.logsumexp(weighted, dim=0))


def _log(weights: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # a weight of zero
        return np.asarray(np.log(weights))


# ---- the run folder


class StoredComponent(NamedTuple):
    """A component of a mixture's folder."""

    folder: Path
    weight: float
    source: str  # where it was copied from, for information only


class StoredMixture(NamedTuple):
    """What a mixture's folder says."""

    rule: Rule
    components: list[StoredComponent]


def write_mixture(
    folder: str | Path,
    runs: Sequence[str | Path],
    weights: Sequence[float],
    rule: Rule,
    about: dict[str, Any] | None = None,
    sources: Sequence[str] | None = None,
) -> None:
    """Copy the runs into `folder` and make it a mixture's.

    config.json is written last: a kill leaves the mixture that was there before, or none. Components are named by
    their content, so that a mixture may be written over an older one.
    """
    folder = Path(folder)
    check_target(folder)
    entries: list[dict[str, Any]] = []
    for run, weight, source in zip(runs, weights, sources or [str(run) for run in runs], strict=True):
        files = [path for path in sorted(Path(run).iterdir()) if path.is_file() and _is_copied(path.name)]
        digests = {path.name: sha256_of(path) for path in files}
        name = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]
        for path in files:
            _copy(path, folder / "components" / name / path.name, digests[path.name])
        entries.append({"name": name, "weight": float(weight), "source": source, "sha256": digests})
    write_listed(folder, "vocabulary.txt", (Path(runs[0]) / "vocabulary.txt").read_bytes())
    config = {"format_version": FORMAT_VERSION, "kind": KIND, "context": rule, "components": entries, **(about or {})}
    write_listed(folder, "config.json", (json.dumps(config, indent=2) + "\n").encode())
    used = {entry["name"] for entry in entries}
    for old in (folder / "components").iterdir():
        if _NAME.fullmatch(old.name) and old.name not in used and not old.is_symlink():
            shutil.rmtree(old)


def check_target(folder: Path) -> None:
    """Raise a ConfigError where a mixture would overwrite another kind of run, or something else."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, expected a folder for the mixture; choose another --out")
    if not (folder / "config.json").exists():
        found = {each.name for each in folder.iterdir()} if folder.exists() else set()
        if found and ("components" not in found or found - set(_WRITTEN_FIRST)):
            raise ConfigError(f"{folder} holds other files and no mixture; choose another --out")
        return
    try:
        kind = json.loads((folder / "config.json").read_bytes()).get("kind", "an HMM")
    except (OSError, ValueError, AttributeError):
        kind = "something unreadable"
    if kind != KIND:
        raise ConfigError(
            f"{folder} holds another run ({kind}), and a mixture would overwrite it; choose another --out"
        )


def read_mixture(folder: str | Path) -> StoredMixture:
    """Read and check a mixture's config.json and the files that it names, none of them outside the folder."""
    folder = Path(folder)
    path = folder / "config.json"
    config = read_object(folder, "config.json", _REMEDY)
    if config.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {shortened(config.get('format_version'))}, expected {FORMAT_VERSION}; {_REMEDY}"
        )
    check_keys(path, config, ("format_version", "kind", "context", "components", "valid"))
    rule: Rule = text_in(path, config, "context", ("reset", "carry"))  # type: ignore[assignment]
    entries = config.get("components")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_COMPONENTS:
        raise CheckpointError(f"{path} does not describe a mixture: it has no list of components; {_REMEDY}")
    found = []
    for number, entry in enumerate(entries):
        where = f"components[{number}]."
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), dict):
            raise CheckpointError(f"{path}: components[{number}] does not describe a mixture's component; {_REMEDY}")
        check_keys(path, entry, ("name", "weight", "source", "sha256"), where)
        weight = float(number_in(path, entry, "weight", 0, 1, where=where))
        source = text_in(path, entry, "source", where=where)
        found.append((text_in(path, entry, "name", where=where), weight, source, entry["sha256"]))
    if not abs(math.fsum(weight for _, weight, _, _ in found) - 1) < 1e-6:
        raise CheckpointError(f"{path} has weights that do not sum to one; {_REMEDY}")
    components = []
    for name, weight, source, digests in found:
        component = folder / "components" / name
        if not _NAME.fullmatch(name) or not component.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(
                f"{path} names a component outside its folder: {name!r}; make it again with vlhmm mix"
            )
        for file, digest in digests.items():
            part = component / file
            if Path(file).name != file or "\0" in file or not part.resolve().is_relative_to(folder.resolve()):
                raise CheckpointError(f"{path} names a file outside its folder: {file!r}; make it again with vlhmm mix")
            if not part.is_file() or sha256_of(part) != digest:
                raise CheckpointError(
                    f"{part} is missing or differs from the file that was mixed; restore it, or make it again with vlhmm mix"
                )
        components.append(StoredComponent(component, weight, source))
    return StoredMixture(rule, components)


def _is_copied(name: str) -> bool:
    return name not in _NOT_COPIED and not name.startswith(".")


def _copy(source: Path, target: Path, digest: str | None) -> None:
    if digest is not None and target.is_file() and sha256_of(target) == digest:
        return
    try:
        with replace_atomically(target) as temporary:
            shutil.copyfile(source, temporary)
    except OSError as error:
        raise CheckpointError(
            f"cannot copy {source} to {target}: {error.strerror or error}; choose another --out"
        ) from None
