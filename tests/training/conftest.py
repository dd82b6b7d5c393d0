"""What the tests of training share."""

import pytest

from toy import toy_lines
from vlhmm.data.corpora import Corpus, load_texts


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("toy")
    for name, count, seed in (("train", 400, 1), ("valid", 60, 2)):
        (folder / f"{name}.txt").write_text("\n".join(map(" ".join, toy_lines(count, seed))) + "\n")
    return load_texts(folder / "train.txt", folder / "valid.txt")
