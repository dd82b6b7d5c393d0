"""Run all work of the model in one thread. Input: jobs from the event loop. Output: futures and pieces of text.

The model's tile caches belong to one thread, and its kernels use every core, so one worker serves the waiting requests
in rounds. A round scores all waiting texts in one pass, adds one word to every open completion in one pass, and answers
a few short queries and one long one. A cancelled job is dropped at the next round, or between the parts of a long
product.

A query may take a minute. Between the parts of its products the worker serves shorter jobs: a round of scores and
completions, and queries of a higher `Priority`. At least half of the time is spent on the query, unless it is a
preparation in the background.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from enum import IntEnum
from typing import Any

from vlhmm.queries.left_to_right import has_hidden_states
from vlhmm.server.generation import Generation, Piece, step
from vlhmm.server.scoring import GivenUp, Token, score_texts

_QUICK_AT_ONCE = 8  # quick questions answered in one round
log = logging.getLogger("vlhmm.server")


class Job:
    """A unit of work with a future."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.given_up = False

    def give_up(self) -> None:
        """Cancel the job: no client waits for it any more."""
        self.given_up = True
        self.future.cancel()

    def finish(self, result: Any) -> None:
        with suppress(InvalidStateError):  # given up meanwhile
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class ScoreJob(Job):
    """Texts to score. The result is a list of `Token`s for each."""

    def __init__(self, texts: Sequence[Sequence[int]], num_top: int) -> None:
        super().__init__()
        self.texts, self.num_top = texts, num_top
        self.num_tokens = sum(map(len, texts))


class GenerateJob(Job):
    """Texts to generate. `listen` is called with each `Piece`; the result is the generation."""

    def __init__(self, generation: Generation, listen: Callable[[Piece], None] | None = None) -> None:
        super().__init__()
        self.generation, self.listen = generation, listen


class Priority(IntEnum):
    """Priorities of queries. A waiting query of a higher priority is answered between the parts of a running one."""

    BACKGROUND = 0  # nobody waits for it yet
    LONG = 1  # seconds
    QUICK = 2


class CallJob(Job):
    """Any other query. `call` is given a function that returns whether the job was cancelled."""

    def __init__(self, call: Callable[[Callable[[], bool]], Any], priority: Priority = Priority.QUICK) -> None:
        super().__init__()
        self.call, self.priority = call, priority


class Scheduler:
    """The thread that owns the model."""

    def __init__(self, model: Any, batch_tokens: int = 16_384) -> None:
        self.model, self.batch_tokens = model, batch_tokens
        self._scores: deque[ScoreJob] = deque()
        self._calls: deque[CallJob] = deque()
        self._generations: list[GenerateJob] = []
        self._changed = threading.Condition()
        self._closed = False
        self.rounds = self.scored_texts = self.score_passes = self.generated_tokens = self.generate_passes = 0
        self.busy_seconds = 0.0
        self._asked: CallJob | None = None  # the question that is being answered
        self._next_check = 0.0  # when others may be served within it again
        if has_hidden_states(model):
            model.distributions.interrupt = self._check
        self._thread = threading.Thread(target=self._run, name="vlhmm-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> Job:
        """Add a job to the queue."""
        with self._changed:
            if self._closed:
                job.fail(RuntimeError("the server is stopping"))
                return job
            if isinstance(job, ScoreJob):
                self._scores.append(job)
            elif isinstance(job, GenerateJob):
                self._generations.append(job)
            else:
                assert isinstance(job, CallJob)
                self._calls.append(job)
            self._changed.notify()
        return job

    def close(self, seconds: float = 10.0) -> None:
        """Finish the current round, cancel the remaining jobs, and end the thread."""
        with self._changed:
            self._closed = True
            for job in [*self._scores, *self._calls, *self._generations]:
                job.give_up()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def waiting(self) -> int:
        return len(self._scores) + len(self._calls) + len(self._generations)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._scores or self._calls or self._generations or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
            began = time.perf_counter()
            self._round(Priority.BACKGROUND)
            self.busy_seconds += time.perf_counter() - began

    def _round(self, least: int) -> None:
        """Serve the waiting texts, every open completion, some short queries and one other query of sufficient priority."""
        with self._changed:
            scores = self._take_scores()
            fit = [job for job in self._calls if job.priority >= least]
            calls = [job for job in fit if job.priority == Priority.QUICK][:_QUICK_AT_ONCE]
            calls += [job for job in fit if job.priority < Priority.QUICK][:1]
            for job in calls:
                self._calls.remove(job)
            self._generations = [job for job in self._generations if not job.given_up]
            generations = list(self._generations)
        if scores:
            self._score(scores)
        if generations:
            self._generate(generations)
        for job in calls:
            if not job.given_up:
                self._answer(job)
        self.rounds += 1

    def _take_scores(self) -> list[ScoreJob]:
        """Take the waiting texts that fit in one pass: the first, and others with the same number of alternatives."""
        taken: list[ScoreJob] = []
        left: deque[ScoreJob] = deque()
        tokens = 0
        for job in self._scores:
            if job.given_up:
                continue
            fits = not taken or (
                bool(job.num_top) == bool(taken[0].num_top) and tokens + job.num_tokens <= self.batch_tokens
            )
            (taken if fits else left).append(job)
            tokens += job.num_tokens if fits else 0
        self._scores = left
        return taken

    def _score(self, jobs: list[ScoreJob]) -> None:
        texts = [text for job in jobs for text in job.texts]
        num_top = max(job.num_top for job in jobs)
        try:
            found = score_texts(self.model, texts, num_top, lambda: self._closed or all(job.given_up for job in jobs))
        except GivenUp:
            for job in jobs:
                job.give_up()
            return
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].fail(error)
            else:  # one of them is to blame: each by itself
                for job in jobs:
                    self._score([job])
            return
        self.score_passes += 1
        self.scored_texts += len(texts)
        first = 0
        for job in jobs:
            mine = found[first : first + len(job.texts)]
            first += len(job.texts)
            job.finish([[Token(t.id, t.log_prob, t.top[: job.num_top]) for t in text] for text in mine])

    def _generate(self, jobs: list[GenerateJob]) -> None:
        ready = []
        for job in jobs:
            try:
                job.generation.prepare()
                ready.append(job)
            except Exception as error:
                self._remove(job)
                job.fail(error)
        try:
            answers = step(self.model, [job.generation for job in ready])
        except Exception as error:
            for job in ready:
                self._remove(job)
                job.fail(error)
            return
        self.generate_passes += 1
        for job, pieces in zip(ready, answers, strict=True):
            self.generated_tokens += len(pieces)
            if job.listen is not None:
                for piece in pieces:
                    job.listen(piece)
            if not job.generation.open_rows:
                self._remove(job)
                job.finish(job.generation)

    def _remove(self, job: GenerateJob) -> None:
        with self._changed:
            self._generations = [other for other in self._generations if other is not job]

    def _answer(self, job: CallJob) -> None:
        self._asked = job
        try:
            job.finish(job.call(lambda: job.given_up))
        except GivenUp:
            job.give_up()
        except Exception as error:
            job.fail(error)
        finally:
            self._asked = None

    def _check(self) -> None:
        """Between the parts of long products: stop a cancelled query, or serve other jobs meanwhile.

        Products of scores and completions are not interrupted. Nested queries have increasing priorities, so they are at most
        three deep.
        """
        job = self._asked
        if job is None:
            return
        if job.given_up or self._closed:
            raise GivenUp
        began = time.perf_counter()
        if began < self._next_check or not self._others_wait(job.priority):
            return
        self._asked = None
        try:
            self._round(job.priority + 1)
        finally:
            self._asked = job
            ended = time.perf_counter()
            self._next_check = ended + (ended - began if job.priority > Priority.BACKGROUND else 0.0)

    def _others_wait(self, priority: int) -> bool:
        with self._changed:
            waiting = self._scores or self._generations or any(job.priority > priority for job in self._calls)
            return bool(waiting)
