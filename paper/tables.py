"""The paper's tables and figures as lists of rows, for two families of HMMs:

    softmax   the paper's model, trained in a way that two cores can afford
    em        ours: block-factored transitions, generalized EM (the presets em-ptb and em-wikitext-2)

A step of the paper's softmax costs |Z|² however few tokens it has, so these models are trained by generalized EM too: a
few hundred steps on the counts of the whole text instead of tens of thousands on 512 tokens each. The note of a run says
how it differs from the paper. Seconds are estimates for two cores; finished runs have measured times.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from paper import reported as paper
from paper.rows import Hmm, KneserNey, Neural, Row, Run
from vlhmm.config import unknown
from vlhmm.training.presets import preset

TITLES = {
    "table1": "Main results",
    "table2": "Ablations at 2^14 states, Penn Treebank",
    "table3": "Emission constraints, Penn Treebank",
    "figure-states": "Perplexity by number of states, Penn Treebank",
    "figure-factored": "State embeddings, independent or factored by block, at 2^14 states, Penn Treebank",
}
CORPUS_TITLES = {"ptb": "Penn Treebank", "wikitext-2": "WikiText-2"}
PAPERS, OURS = "the paper's (softmax)", "ours (block-factored, EM)"

# Priority: lower numbers run first
BASELINE, MAIN, WIKITEXT, SCALAR, MIDDLE, ABLATION, STATES, CONSTRAINT, FACTORED, LARGE = range(10, 110, 10)

EM_EPOCHS = 150  # at most, for sizes and ablations that follow the main run's recipe
# For the paper's softmax where an epoch takes a minute or more, and without dropout, where the best epoch comes early
FEWER_EPOCHS = {"2^16": 50, "wikitext-2": 80, "no-dropout": 60}


class LessDropout(NamedTuple):
    """How models with 100 tokens or more for each state are trained: with dropout of half the states they underfit."""

    epochs: int
    decay: float
    updates: int = 6  # optimizer steps per E-step

    def settings(self) -> tuple[str, ...]:
        return (
            "training.state_dropout=0.25", f"training.weight_decay={self.decay:g}", "training.checks_per_epoch=0.05",
            f"training.m_step_updates={self.updates}", f"training.epochs={self.epochs}",
        )  # fmt: skip


LESS_DROPOUT = {
    2**10: LessDropout(300, 0), 2**11: LessDropout(300, 0.3), 2**12: LessDropout(300, 0.3), 2**13: LessDropout(200, 1),
}  # fmt: skip
FEW_BLOCKS = 8  # up to here an epoch is slow, and 200 are enough


def less_dropout(num_states: int, blocks: int) -> LessDropout | None:
    """Return how a small model is trained; None for a larger one."""
    found = LESS_DROPOUT.get(num_states)
    return found._replace(epochs=200) if found is not None and blocks <= FEW_BLOCKS else found


LEAST_SLOTS = 8  # least number of states per block; a small model gets fewer blocks
# for a pass over PTB and its optimizer steps
SOFTMAX_SECONDS = {2**10: 1.0, 2**11: 1.1, 2**12: 1.4, 2**13: 2.2, 2**14: 5.5, 2**15: 17.0, 2**16: 70.0}
EM_SECONDS = {2**10: 0.6, 2**11: 0.7, 2**12: 0.8, 2**13: 1.2, 2**14: 1.9, 2**15: 4.6, 2**16: 7.0}


def wide_blocks(states_per_block: int) -> float:
    """Return the seconds that larger blocks add to a pass over PTB: a token costs the square of their size."""
    return (states_per_block / 128) ** 2


# Where tiles take much memory: in larger batches more lines share a tile. This changes only the time.
MORE_LINES = "training.batch_tokens=262144"

# How the paper's model is trained here
COMMON = ("training.batch=sentences", "training.schedule=cosine", "training.rate=0.01")
BY_EM = (
    *COMMON, "training.method=em", "training.batch_tokens=65536", f"training.epochs={EM_EPOCHS}", "training.beta2=0.99",
    "training.warmup_steps=10", "training.weight_decay=1", "training.checks_per_epoch=0.1",
)  # fmt: skip
HOW_BY_EM = "generalized EM, {epochs} epochs of {steps} optimizer steps, cosine schedule, weight decay 1 (paper: 50 epochs by gradient, 16 streams of 32 tokens, plateau)"
HOW_SMALL = "generalized EM, {epochs} epochs of {steps} optimizer steps, cosine schedule, weight decay {decay:g}, state dropout 0.25 (paper: 50 epochs by gradient, 16 streams of 32 tokens, plateau, state dropout 0.5)"
BY_GRADIENT = (*COMMON, "training.batch_tokens=8192", "training.epochs=4", "training.checks_per_epoch=1")
HOW_BY_GRADIENT = "4 epochs by gradient, cosine schedule, sentence batches of 8,192 tokens (paper: 50 epochs, 16 streams of 32 tokens, plateau)"
# Where every state emits every word, states differ only by their initial emissions
NONE = ("model.emission_init_scale=6", "training.batch_tokens=4096", "training.epochs=16")
HOW_NONE = "16 epochs by gradient, cosine schedule, sentence batches of 4,096 tokens, initial emission logits scaled by 6 (paper: 50 epochs, 16 streams of 32 tokens, plateau)"
# Free parameters: the M-step has a closed form, and there are no embeddings to drop or decay
CLOSED_FORM_EPOCHS = 40
CLOSED_FORM = (
    "model.parameterization=scalar", "training.optimizer=closed-form", "training.smoothing=30",
    "training.state_dropout=0", "training.embedding_dropout=0", "training.weight_decay=0",
    f"training.epochs={CLOSED_FORM_EPOCHS}",
)  # fmt: skip
HOW_CLOSED_FORM = "M-steps in closed form, smoothed with 30 pseudo-counts, without state dropout"

# The paper's baselines with schedules that two cores can afford
FF = ("num_streams=32", "schedule=cosine", "checks_per_epoch=1")
BY_SGD = ("optimizer=sgd", "rate=20", "clip=0.25", "dropout_mask=segment", "schedule=cosine", "checks_per_epoch=2")
HOW_BY_SGD = (
    "{epochs} epochs of SGD, rate 20 with cosine schedule, gradients clipped at 0.25, one dropout mask per segment "
    "(paper: 50 epochs of AdamW, rate 1e-3, plateau; dropout masks not stated)"
)
FF_EPOCHS = {"ptb": 15, "wikitext-2": 4}
LSTM_EPOCHS = {"ptb": 30, "wikitext-2": 6}
SHORT_EPOCHS = 10  # of an LSTM that only serves as a teacher


# ---- runs


def softmax(
    num_states: int,
    *changes: str,
    blocks: int = 128,
    corpus: str = "ptb",
    by_gradient: bool = False,
    epochs: int = EM_EPOCHS,
    m_step_updates: int = 3,
    m_step_row_parts: int = 1,
    **about: Any,
) -> Run:
    """Return the paper's model of that size, with changes."""
    sizes = (f"model.num_states={num_states}", f"model.num_blocks={blocks}")
    if by_gradient:
        training, note = BY_GRADIENT, HOW_BY_GRADIENT
    elif less := less_dropout(num_states, blocks):
        training = (*BY_EM, *less.settings())
        note = HOW_SMALL.format(epochs=less.epochs, steps=less.updates, decay=less.decay)
    else:
        training, note = BY_EM, HOW_BY_EM.format(epochs=epochs, steps=m_step_updates)
    if m_step_updates != 3:
        changes = (*changes, f"training.m_step_updates={m_step_updates}")
    if m_step_row_parts != 1:
        changes = (*changes, f"training.m_step_row_parts={m_step_row_parts}")
        note += f"; an optimizer step reads the transitions out of every {m_step_row_parts}th state, in turn"
    if epochs != EM_EPOCHS:
        changes = (*changes, f"training.epochs={epochs}")
    if not by_gradient and 1 < blocks < num_states // 256:
        changes = (*changes, MORE_LINES)
    if "training.optimizer=closed-form" in changes:
        note = f"EM, {CLOSED_FORM_EPOCHS} epochs with {HOW_CLOSED_FORM}"
    return run_of(
        Hmm(f"paper-{corpus}", (*sizes, *training, *changes)),
        [corpus, "softmax", num_states, "" if blocks in (1, 128) else f"m{blocks}"],
        note,
        corpus=corpus,
        is_ablation=num_states == 2**14,
        **about,
    )


def em(
    num_states: int | None = None, *changes: str, blocks: int | None = None, corpus: str = "ptb", **about: Any
) -> Run:
    """Return the preset em-ptb or em-wikitext-2, possibly of another size or with changes."""
    base = preset(f"em-{corpus}")
    num_states = num_states or base.model.num_states
    is_main = num_states == base.model.num_states and blocks is None and not changes
    if not is_main:
        of_size = blocks or min(base.model.num_blocks, max(1, num_states // LEAST_SLOTS))
        epochs = min(base.training.epochs, EM_EPOCHS)
        sizes: tuple[str, ...] = (f"model.num_states={num_states}", f"model.num_blocks={of_size}")
        less = less_dropout(num_states, of_size) if num_states <= 2**11 else None  # at 2^13 ours gains nothing by it
        sizes += (*less.settings(), "training.embedding_dropout=0") if less else (f"training.epochs={epochs:g}",)
        changes = (*sizes, *changes, *([MORE_LINES] if num_states > base.model.num_states else []))
    recipe = Hmm(f"em-{corpus}", changes)
    config = recipe.config()
    size = "" if is_main else num_states
    how = f"generalized EM, {config.training.epochs:g} epochs with {config.training.m_step_updates} optimizer steps per E-step"
    if config.training.state_dropout != base.training.state_dropout:
        how += f", state dropout {config.training.state_dropout:g}, weight decay {config.training.weight_decay:g}"
    if config.training.optimizer == "closed-form":
        how = f"EM, {CLOSED_FORM_EPOCHS} epochs with {HOW_CLOSED_FORM}"
    note = f"block-factored transitions, {config.model.num_blocks} blocks; {how}"
    parts = [corpus, "em", size, "" if blocks in (None, base.model.num_blocks) else f"m{blocks}"]
    return run_of(recipe, parts, note, corpus=corpus, is_ablation=num_states == 2**14, **about)


class Guide(NamedTuple):
    """What a teacher provides in addition to evidence about the states."""

    title: str
    cost: float  # of an epoch, relative to ours without a teacher
    changes: tuple[str, ...]
    note: str
    is_short: bool = False  # the teacher is the LSTM of few epochs
    retired: str = ""  # why the run cannot be repeated: only its record is shown


GUIDES = {
    "guided": Guide(
        "ours, distilled from our LSTM",
        1.2,
        ("training.epochs=200", "training.embedding_dropout=0.25"),
        "as ours, 200 epochs; clusters of our LSTM's hidden vectors are evidence about the states during the first 95% of "
        "training",
    ),
    "taught": Guide(
        "ours, distilled from our LSTM with words it draws",
        2.0,
        ("training.epochs=210", "training.embedding_dropout=0.1"),
        "as guided, 210 epochs with less embedding dropout; two fifths of the counts are of words that our LSTM drew as "
        "continuations of the text",
        retired="training.guide_draws=6 and training.guide_share=0.4 no longer exist; vlhmm-read does the same with a text",
    ),
    "read": Guide(
        "ours, distilled from our LSTM and its text",
        2.4,
        (
            "training.epochs=220",
            "training.embedding_dropout=0",
            "distillation.text=8400000",
            "training.extra_tokens=1400000",
        ),
        "as guided, 220 epochs without embedding dropout; every E-step also reads 1.4M tokens of an 8.4M-token text that our "
        "LSTM generated",
    ),
    "read-65536": Guide(
        f"ours, 512 blocks, distilled from our LSTM of {SHORT_EPOCHS} epochs and its text",
        2.4,
        (
            "model.num_states=65536",
            "model.num_blocks=512",
            MORE_LINES,
            "training.epochs=160",
            "training.embedding_dropout=0.15",
            "distillation.text=5600000",
            "training.extra_tokens=1120000",
        ),
        "as guided, twice the states in twice the blocks, 160 epochs with less embedding dropout; every E-step also reads "
        "1.1M tokens of a 5.6M-token text generated by an LSTM trained for a third of the epochs",
        is_short=True,
    ),
}


def guided(corpus: str, how: str) -> Run:
    """Return the main run distilled from our own LSTM: evidence about the states, and words or text it generates."""
    guide = GUIDES[how]
    teacher = short_lstm() if guide.is_short else lstm(corpus)
    recipe = Hmm(f"em-{corpus}", ("distillation.weight=1", *guide.changes), teacher=teacher)
    note = f"{guide.note}; the wall time includes that of the LSTM"
    priority = MAIN + 1 + list(GUIDES).index(how)
    seconds = guide.cost * EM_SECONDS[recipe.config().model.num_states]
    return run_of(recipe, [corpus, "em", how], note, corpus=corpus, priority=priority, seconds=seconds, retired=guide.retired)


# Every E-step reads the whole text in contiguous streams; posteriors are smoothed within a segment.
CARRIED = (
    "training.context=carry", "training.batch=streams", "training.num_streams=512", "training.segment_length=128"
)  # fmt: skip


def carried(corpus: str) -> Run:
    """Return the main run under the paper's own context rule, in training as in evaluation."""
    base = em(corpus=corpus, priority=MAIN, seconds=EM_SECONDS[preset(f"em-{corpus}").model.num_states])
    note = f"{base.note}; trained on 512 streams in segments of 128 tokens, the state carried over line ends"
    return replace(base, name=f"{base.name}-carry", recipe=Hmm(f"em-{corpus}", CARRIED), note=note)


# The rule of the paper's released code: the state is reset after <eos> inside a segment, carried over segment cuts.
PAPERS_RULE = (
    "training.batch=streams", "training.context=paper", "training.num_streams=512", "training.segment_length=32"
)  # fmt: skip


def softmax_by_papers_rule(num_states: int) -> Run:
    """Return the paper's model, trained by generalized EM under the context rule that the paper trains by."""
    run = softmax(num_states, *PAPERS_RULE, called="paper-rule", priority=MIDDLE, seconds=SOFTMAX_SECONDS[num_states])
    note = "trained by the paper's context rule: lines shuffled every epoch, segments of 32 tokens, but 512 streams instead of 16"
    return replace(run, note=f"{run.note}; {note}")


def dense_900(way: str, seconds: float) -> Run:
    """Return the 900-state HMM with free parameters, every state emitting every word; by EM or by Adam."""
    ways = {
        "em": (
            f"EM, 30 epochs with {HOW_CLOSED_FORM}",
            (
                *CLOSED_FORM,
                "training.method=em",
                "training.epochs=30",
                "training.batch_tokens=16384",
                "training.checks_per_epoch=1",
            ),
        ),
        "adam": (
            "12 epochs by gradient, AdamW 1e-2, cosine schedule, sentence batches of 2,048 tokens, no state dropout",
            (
                "model.parameterization=scalar",
                "training.state_dropout=0",
                "training.epochs=12",
                "training.batch_tokens=2048",
                "training.schedule=cosine",
                "training.checks_per_epoch=2",
            ),
        ),
    }
    note, changes = ways[way]
    note += "; initial emission logits within 6 of zero instead of 1"
    # with nearly equal initial emissions, states are still alike after ten iterations
    model = ("model.num_states=900", "model.emission_init_scale=6")
    recipe = Hmm("paper-ptb-none", (*model, "training.batch=sentences", *changes))
    return run_of(recipe, ["ptb", "hmm-900", way], note, corpus="ptb", priority=SCALAR, seconds=seconds)


def lstm(corpus: str) -> Neural:
    return Neural("lstm", (f"epochs={LSTM_EPOCHS[corpus]}", *BY_SGD))


def short_lstm() -> Neural:
    return Neural("lstm", (f"epochs={SHORT_EPOCHS}", *BY_SGD, "checks_per_epoch=1"), called="short")


def baseline(corpus: str, kind: str, seconds: float) -> Run:
    """Return a baseline with the paper's settings, except for a schedule that two cores can afford."""
    recipes: dict[str, tuple[KneserNey | Neural, str]] = {
        "kn": (KneserNey(), "interpolated modified Kneser-Ney, no pruning"),
        "ff": (
            Neural("ff", (f"epochs={FF_EPOCHS[corpus]}", *FF)),
            f"{FF_EPOCHS[corpus]} epochs, cosine schedule, batches of 32 x 64 tokens "
            "(paper: 100 epochs, plateau, 128 x 64)",
        ),
        "lstm": (lstm(corpus), HOW_BY_SGD.format(epochs=LSTM_EPOCHS[corpus])),
        "lstm-short": (short_lstm(), HOW_BY_SGD.format(epochs=SHORT_EPOCHS)),
    }
    recipe, note = recipes[kind]
    priority = {"ptb": BASELINE, "wikitext-2": WIKITEXT}[corpus] + list(recipes).index(kind)
    return run_of(recipe, [corpus, kind], note, corpus=corpus, priority=priority, seconds=seconds)


def run_of(
    recipe: Hmm | Neural | KneserNey,
    name: list[str | int],
    note: str,
    *,
    corpus: str,
    priority: int,
    seconds: float,
    called: str = "",
    retired: str = "",
    is_ablation: bool = False,
) -> Run:
    return Run(
        name="-".join(str(part) for part in [*name, called] if part),
        corpus=corpus,
        recipe=recipe,
        seconds_per_epoch=seconds,
        priority=priority,
        note=note,
        retired=retired,
        is_ablation=is_ablation,
    )


def softmax_of_size(num_states: int) -> Run:
    priority = STATES if num_states < 2**13 else MIDDLE if num_states < 2**15 else LARGE
    seconds = SOFTMAX_SECONDS[num_states]
    if num_states == 2**16:  # a step on all rows takes half a minute on one core, so take more and cheaper steps
        return softmax(num_states, priority=priority, seconds=seconds, epochs=FEWER_EPOCHS["2^16"], m_step_updates=9, m_step_row_parts=4)
    return softmax(num_states, priority=priority, seconds=seconds)


def em_of_size(num_states: int, priority: int = STATES) -> Run:
    main = preset("em-ptb").model
    is_main = num_states == main.num_states
    # above the main row, more blocks of the same size: an epoch costs a third of one with larger blocks
    blocks = num_states * main.num_blocks // main.num_states if num_states > main.num_states else None
    return em(num_states, blocks=blocks, priority=MAIN if is_main else priority, seconds=EM_SECONDS[num_states])


# ---- tables and figures


def table1() -> list[Row]:
    """Return the main results on both corpora."""
    ptb = {"kn": 2, "ff": 215, "lstm": 110}
    wikitext = {"kn": 6, "ff": 450, "lstm": 600}
    main = preset("em-ptb").model.num_states
    teacher = replace(baseline("ptb", "lstm-short", ptb["lstm"]), priority=MAIN + len(GUIDES))  # just before its student
    return [
        *main_rows("ptb", ptb, softmax_of_size(2**15), em_of_size(main)),
        main_row("ptb", "vlhmm-carry", "VL-HMM, ours, trained with carried state", carried("ptb"), "vlhmm"),
        papers_rule_row("softmax-paper-rule", 2**13),
        papers_rule_row("softmax-paper-rule-16384", 2**14),
        main_row("ptb", "lstm-short", f"2x256 LSTM, {SHORT_EPOCHS} epochs (teacher)", teacher, "lstm"),
        *(guided_row("ptb", how) for how in GUIDES),
        *main_rows(
            "wikitext-2",
            wikitext,
            softmax(2**15, corpus="wikitext-2", priority=LARGE + 1, seconds=35, epochs=FEWER_EPOCHS["wikitext-2"]),
            em(corpus="wikitext-2", priority=WIKITEXT, seconds=20),
        ),
    ]


def main_row(
    corpus: str, name: str, model: str, run: Run | None, compared_with: str | None = None, states: int | None = None
) -> Row:
    reported = paper.MAIN.get((corpus, compared_with or name))
    return Row(table="table1", corpus=corpus, name=name, model=model, run=run, reported=reported, states=states)


def papers_rule_row(name: str, num_states: int) -> Row:
    """Return the paper's model trained by its own context rule, compared with the paper's number for that size."""
    row = main_row("ptb", name, f"VL-HMM, {PAPERS}, trained by its context rule", softmax_by_papers_rule(num_states))
    return replace(row, reported=paper.STATES[num_states])


def guided_row(corpus: str, how: str) -> Row:
    row = main_row(corpus, f"vlhmm-{how}", f"VL-HMM, {GUIDES[how].title}", guided(corpus, how), "vlhmm")
    if row.num_states == preset(f"em-{corpus}").model.num_states:
        return row
    return replace(row, reported=paper.STATES[row.num_states or 0])  # the paper's model of that size


def main_rows(corpus: str, seconds: dict[str, int], papers: Run, ours: Run) -> list[Row]:
    """Return a corpus's rows of table 1, in the paper's order."""
    row = partial(main_row, corpus)
    small_hmms = [  # the paper cites them for Penn Treebank only
        row("hmm-rnn", "HMM+RNN", None),
        row("hmm-900", "HMM, 900 states", None, states=900),
        *(
            row(f"hmm-900-{way}", f"HMM, 900 states, trained here by {title}", dense_900(way, cost), "hmm-900")
            for way, title, cost in (("em", "EM", 30), ("adam", "Adam", 40))
        ),
    ]
    return [
        row("kn", "KN 5-gram", baseline(corpus, "kn", seconds["kn"])),
        row("awd-lstm", "AWD-LSTM", None),
        row("ff", "256 FF 5-gram", baseline(corpus, "ff", seconds["ff"])),
        row("lstm", "2x256 LSTM", baseline(corpus, "lstm", seconds["lstm"])),
        *(small_hmms if corpus == "ptb" else []),
        row("vlhmm-softmax", f"VL-HMM, {PAPERS}", papers, "vlhmm"),
        row("vlhmm-em", f"VL-HMM, {OURS}", ours, "vlhmm"),
    ]


def table2() -> list[Row]:
    """Neural parameters, state dropout and block embeddings, changed one at a time at 2^14 states; free parameters are
    trained by EM in closed form, which also means no state dropout."""
    full = paper.ABLATIONS["full"]
    rows = [row2("softmax", f"VL-HMM, {PAPERS}", softmax_of_size(2**14), full)]
    changes: tuple[tuple[str, str, tuple[str, ...], float, float], ...] = (
        ("scalar", "- neural parameters", CLOSED_FORM, 8.0, 4.0),
        ("no-dropout", "- state dropout", ("training.state_dropout=0",), 17.0, 4.0),
        ("factored", "+ block embeddings", ("model.embedding=factored",), 6.0, 2.2),
    )
    for name, label, change, seconds, _ in changes:
        epochs = FEWER_EPOCHS.get(name, EM_EPOCHS)
        run = softmax(2**14, *change, called=name, priority=ABLATION, seconds=seconds, epochs=epochs)
        rows.append(row2(f"softmax-{name}", f"{label}, {PAPERS}", run, paper.ABLATIONS[name]))
    rows.append(row2("em", f"VL-HMM, {OURS}", em_of_size(2**14, ABLATION), full))
    for name, label, change, _, seconds in changes:
        run = em(2**14, *change, called=name, priority=ABLATION, seconds=seconds)
        rows.append(row2(f"em-{name}", f"{label}, {OURS}", run, paper.ABLATIONS[name]))
    return rows


def row2(name: str, model: str, run: Run, reported: paper.Reported) -> Row:
    return Row(table="table2", corpus="ptb", name=name, model=model, run=run, reported=reported)


def table3() -> list[Row]:
    """Return which states may emit which words: Brown blocks of several sizes, every state, or random subsets."""
    rows = [row3(papers_constraint(*shape), shape, PAPERS, "softmax", number) for shape, number in paper.CONSTRAINTS]
    rows[-1] = replace(rows[-1], name="softmax-brown-16384-k128-again")  # printed twice, with two numbers
    by_gradient = softmax(2**13, blocks=64, by_gradient=True, called="gradient", priority=CONSTRAINT, seconds=60)
    shape = ("brown", 2**13, 128, 64)  # trained in the same way as the uniform constraint, to compare them
    rows.append(row3(by_gradient, shape, f"{PAPERS}, by gradient", "softmax-gradient", None))
    reported = {(states, blocks): number for (_, states, _, blocks), number in reversed(paper.CONSTRAINTS) if blocks}
    for states, blocks in ((2**14, 64), (2**14, 128), (2**14, 256), (2**14, 512), (2**13, 64), (2**10, 8)):
        k = states // blocks
        run = em(states, blocks=blocks, priority=CONSTRAINT, seconds=EM_SECONDS[states] + wide_blocks(k))
        rows.append(row3(run, ("brown", states, k, blocks), OURS, "em", reported.get((states, blocks))))
    run = em(2**14, "model.constraint=frequency", called="frequency", priority=CONSTRAINT, seconds=EM_SECONDS[2**14])
    blocks = min(preset("em-ptb").model.num_blocks, 2**14 // LEAST_SLOTS)
    rows.append(row3(run, ("frequency", 2**14, 2**14 // blocks, blocks), OURS, "em", None))
    return rows


Shape = tuple[str, int, int | None, int | None]  # constraint, |Z|, k, M


def papers_constraint(constraint: str, states: int, k: int | None, blocks: int | None) -> Run:
    """Return the paper's model with that constraint."""
    change = f"model.constraint={constraint}"
    if constraint == "none":
        run = softmax(states, change, *NONE, blocks=1, by_gradient=True, called="none", priority=CONSTRAINT, seconds=30)
        return replace(run, note=HOW_NONE)
    if constraint == "uniform":  # every word has its own states: too many pairs for EM
        changes, seconds = (change, f"model.states_per_word={k}"), 250 * (states / 2**13)
        called = f"uniform-k{k}"
        return softmax(states, *changes, by_gradient=True, called=called, priority=CONSTRAINT, seconds=seconds)
    assert k is not None and blocks is not None
    return softmax_of_blocks(states, blocks, CONSTRAINT)


def softmax_of_blocks(states: int, blocks: int, priority: int, *changes: str, called: str = "") -> Run:
    """Return the paper's model with that number of blocks."""
    seconds = SOFTMAX_SECONDS[states] + wide_blocks(states // blocks)
    return softmax(states, *changes, blocks=blocks, called=called, priority=priority, seconds=seconds)


def row3(run: Run, shape: Shape, family: str, short: str, reported: paper.Reported | None) -> Row:
    constraint, states, k, blocks = shape
    name = f"{short}-{constraint}-{states}" + (f"-k{k}" if k else "")
    kind = {"none": "No constraint", "frequency": "Blocks of equal frequency"}.get(constraint, constraint.capitalize())
    label = kind + (f", k={k}" if k else "") + (f", M={blocks}" if blocks else "")
    return Row(table="table3", corpus="ptb", name=name, model=f"{label}, {family}", run=run, reported=reported)


def figure_states() -> list[Row]:
    """Return the rows from 2^10 to 2^16 states."""
    return [
        Row(
            table="figure-states",
            corpus="ptb",
            name=f"{short}-{states}",
            run=run_of_size(states),
            reported=number,
            model=f"2^{states.bit_length() - 1} states, {family}",
            series=family,
            x=states,
        )
        for short, family, run_of_size in (("softmax", PAPERS, softmax_of_size), ("em", OURS, em_of_size))
        for states, number in paper.STATES.items()
    ]


def figure_factored() -> list[Row]:
    """Return the rows with independent state embeddings, and with embeddings composed of a block half and a state half."""
    rows = []
    for kind, numbers in (("independent", paper.INDEPENDENT), ("factored", paper.FACTORED)):
        change = () if kind == "independent" else ("model.embedding=factored",)
        for blocks, number in numbers.items():
            run = softmax_of_blocks(2**14, blocks, FACTORED, *change, called=kind if change else "")
            rows.append(factored_row("softmax", PAPERS, kind, blocks, run, number))
    for kind, numbers in (("independent", paper.INDEPENDENT), ("factored", paper.FACTORED)):
        for blocks in (128, 256):  # the paper's number of blocks, and ours
            seconds = EM_SECONDS[2**14] + wide_blocks(2**14 // blocks)
            run = em(2**14, f"model.embedding={kind}", blocks=blocks, called=kind, priority=FACTORED, seconds=seconds)
            rows.append(factored_row("em", OURS, kind, blocks, run, numbers[blocks]))
    return rows


def factored_row(short: str, family: str, kind: str, blocks: int, run: Run, reported: paper.Reported) -> Row:
    return Row(
        table="figure-factored",
        corpus="ptb",
        name=f"{short}-{kind}-m{blocks}",
        run=run,
        reported=reported,
        model=f"{kind}, M={blocks}, {family}",
        series=f"{kind}, {family}",
        x=blocks,
    )


TABLES: dict[str, Callable[[], list[Row]]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "figure-states": figure_states,
    "figure-factored": figure_factored,
}


def table(name: str) -> list[Row]:
    """Return the rows of a table; refuse an unknown name with the nearest one."""
    if name not in TABLES:
        raise unknown("table", name, list(TABLES))
    return TABLES[name]()
