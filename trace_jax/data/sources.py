"""The table of data sets: where each comes from, what its official files are called, and who licenses it.

A download is verified by size and SHA-256. Every checksum below was established in one of two ways:
  * computed from the file itself at the pinned commit of the public repository that the URL names
    (aime24, amc, amc23, math500, minerva, olympiadbench, bamboogle), or
  * taken from public records that agree: the data set's own published metadata, or several independent projects that
    pin the same file (hotpotqa, arc_challenge, 2wikimultihopqa, musique, mmlu_pro, gpqa_diamond, aime25).
deepscaler is verified by the id of its git object, which is a part of the commit that the URL names. The BFCL
categories come with a package and are read from there, unverified. No checksum was recorded at a first download.

Splits are named "train" and "test"; "test" is what the paper evaluates on, whatever the authors of a set call it
(the dev files of HotpotQA, 2WikiMultihopQA and MuSiQue, whose test answers are not public).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trace_jax.data import fields, formats
from trace_jax.data.errors import DataError
from trace_jax.data.fields import Fields
from trace_jax.data.formats import Format


@dataclasses.dataclass(frozen=True)
class Download:
    """A public file that never changes."""

    url: str
    size: int | None  # bytes; None: not known
    sha256: str = ""  # hexadecimal; "": `git_blob` takes its place
    git_blob: str = ""  # id of the file's git object in the commit that the URL names


@dataclasses.dataclass(frozen=True)
class Split:
    """The official file of one split."""

    names: tuple[str, ...]  # what the file may be called in a folder that is given as --data_dir
    member: str = ""  # its name inside the official ZIP archive, where there is one
    download: Download | None = None  # of the file or the archive; None: can't be downloaded


@dataclasses.dataclass(frozen=True)
class Source:
    """One data set."""

    name: str
    splits: Mapping[str, Split]  # "train", "test"
    fields: Fields
    homepage: str  # where to get it by hand
    licence: str
    read: Format | None = None  # None: BFCL, whose records are spread over several files
    category: str = ""  # of BFCL
    password: str = ""  # of the archive, published beside it

    def only(self, split: str | None) -> Source:
        """The source with that split alone; itself for None. Raises DataError for a split that it does not have."""
        if split is None:
            return self
        if split not in self.splits:
            raise DataError(f"{self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        return dataclasses.replace(self, splits={split: self.splits[split]})

    def download_size(self) -> int | None:
        """Bytes of all files that would be downloaded; None where that is not known."""
        sizes = {item.download.url: item.download.size for item in self.splits.values() if item.download}
        return None if not sizes or None in sizes.values() else sum(sizes.values())


_DEEPSCALER = "https://github.com/agentica-project/deepscaler"
_DEEPSCALER_DATA = (
    "https://raw.githubusercontent.com/agentica-project/deepscaler/95ef74ffee001cce89463f2d61dfdce1d03576c1/"
    "deepscaler/data/"
)
_HOTPOT = "http://curtis.ml.cmu.edu/datasets/hotpot/"
_MUSIQUE = "https://huggingface.co/datasets/bdsaglam/musique/resolve/22873a405dd809893b22ada0b499299fb612d2df/"
_TWO_WIKI = Download(
    "https://www.dropbox.com/s/ms2m13252h6xubs/data_ids_april7.zip?dl=1",
    258_968_175,
    "95df2bf56fdabe034e27aebc580e02264232203cf52552f9efe8a919e5529eef",
)


def _math(name: str, split: str, *names: str, homepage: str, licence: str, download: Download | None = None) -> Source:
    splits = {split: Split(names, download=download)}
    return Source(name, splits, fields.MATH, homepage, licence, formats.math_problem)


def _deepscaler_test(name: str, file: str, *names: str, size: int, sha256: str) -> Source:
    download = Download(_DEEPSCALER_DATA + "test/" + file, size, sha256)
    return _math(name, "test", file, *names, homepage=_DEEPSCALER, licence="MIT (collection)", download=download)


def _choice(name: str, split: Split, read: Format, homepage: str, licence: str, password: str = "") -> Source:
    return Source(name, {"test": split}, fields.MATH, homepage, licence, read, password=password)


def _question(name: str, splits: Mapping[str, Split], official: Format, homepage: str, licence: str) -> Source:
    return Source(name, splits, fields.QUESTION, homepage, licence, formats.or_flashrag(official))


def _bfcl(category: str) -> Source:
    return Source(
        f"bfcl_{category}",
        {"test": Split((f"BFCL_v4_multi_turn_{category}.json",))},
        fields.CONVERSATION,
        "the package bfcl-eval",
        "Apache-2.0",
        category=category,
    )


_ALL = (
    _math(
        "deepscaler",
        "train",
        "deepscaler.json",
        "math_train.json",
        homepage="https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset",
        licence="MIT",
        download=Download(
            _DEEPSCALER_DATA + "train/deepscaler.json", None, git_blob="4bc7b76e082e1982b0b435e3fff32fab60b51b46"
        ),
    ),
    _deepscaler_test(
        "aime24",
        "aime.json",
        "aime24.json",
        size=38_011,
        sha256="03fd341fee10fb71cf906be4eb3042081f314c4d16077489e41f9375085d20d2",
    ),
    _math(
        "aime25",
        "test",
        "aime25.jsonl",
        "aime25.json",
        "test.jsonl",
        homepage="https://huggingface.co/datasets/math-ai/aime25",
        licence="Apache-2.0",
        download=Download(
            "https://huggingface.co/datasets/math-ai/aime25/resolve/563bb8404243c5f09de6ec262f2db674fe5bce9b/"
            "test.jsonl",
            15_813,
            "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
        ),
    ),
    # AMC 12 of 2022 and 2023. The paper's AMC23 is the 40 problems of 2023 alone: amc23.
    _deepscaler_test(
        "amc",
        "amc.json",
        size=38_170,
        sha256="2666a217cb566efb77ebfce61841d5d8855d4b4be89633b29df3a43dcfd942dd",
    ),
    _math(
        "amc23",
        "test",
        "amc23.jsonl",
        "amc23.json",
        "test.jsonl",
        homepage="https://github.com/QwenLM/Qwen2.5-Math",
        licence="see homepage",
        download=Download(
            "https://raw.githubusercontent.com/QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/"
            "evaluation/data/amc23/test.jsonl",
            27_631,
            "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4",
        ),
    ),
    _deepscaler_test(
        "math500",
        "math.json",
        "math500.json",
        size=172_073,
        sha256="02e232722dd1f9ab307124bfff40621d32193632b6b84aa9a246e701f0478141",
    ),
    _deepscaler_test(
        "minerva",
        "minerva.json",
        size=269_352,
        sha256="ba6147602d8b2f9071ecf578e29aa1100c634bdfa982d4c6745c2bd3077554ba",
    ),
    _deepscaler_test(
        "olympiadbench",
        "olympiad_bench.json",
        "olympiadbench.json",
        size=1_582_347,
        sha256="c1e099f7b5830fb843fa52d48d0af8a296a94745cb5981b4ce539dd18af6f8ee",
    ),
    _choice(
        "mmlu_pro",
        Split(
            ("test-00000-of-00001.parquet", "mmlu_pro.parquet"),
            download=Download(
                "https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro/resolve/b189ec765aa7ed75c8acfea42df31fdae71f97be/"
                "data/test-00000-of-00001.parquet",
                4_144_185,
                "0e24a191921c2f453518a537a8b2117bd137e7714d4ef1565e9ba06c1ecb9ad8",
            ),
        ),
        formats.mmlu_pro,
        "https://huggingface.co/datasets/TIGER-Lab/MMLU-Pro",
        "MIT",
    ),
    _choice(
        "arc_challenge",
        Split(
            ("ARC-Challenge-Test.jsonl",),
            member="ARC-V1-Feb2018-2/ARC-Challenge/ARC-Challenge-Test.jsonl",
            download=Download(
                "https://ai2-public-datasets.s3-us-west-2.amazonaws.com/arc/ARC-V1-Feb2018.zip",
                680_841_265,
                "6d2d5ab50b2ceec6ba5f79c921be77cf2de712ea25a2b3f4fff3acc101cecfa0",
            ),
        ),
        formats.arc,
        "https://allenai.org/data/arc",
        "CC BY-SA 4.0",
    ),
    _choice(
        "gpqa_diamond",
        Split(
            ("gpqa_diamond.csv",),
            member="dataset/gpqa_diamond.csv",
            download=Download(
                "https://raw.githubusercontent.com/idavidrein/gpqa/56686c06f5e19865c153de0fdb11be3890014df7/"
                "dataset.zip",
                2_348_038,
                "461ae7329f15a3e35f8184d2dac24b990f34fdf12f366ca4062d8e6638cd08dc",
            ),
        ),
        formats.gpqa,
        "https://github.com/idavidrein/gpqa",
        "CC BY 4.0",
        password="deserted-untie-orchid",
    ),
    _question(
        "hotpotqa",
        {
            "train": Split(
                ("hotpot_train_v1.1.json",),
                download=Download(
                    _HOTPOT + "hotpot_train_v1.1.json",
                    566_426_227,
                    "26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
                ),
            ),
            "test": Split(
                ("hotpot_dev_distractor_v1.json",),
                download=Download(
                    _HOTPOT + "hotpot_dev_distractor_v1.json",
                    46_320_117,
                    "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
                ),
            ),
        },
        formats.hotpotqa,
        "https://hotpotqa.github.io",
        "CC BY-SA 4.0",
    ),
    _question(
        "2wikimultihopqa",
        {
            "train": Split(("train.json", "train.jsonl"), member="train.json", download=_TWO_WIKI),
            "test": Split(("dev.json", "dev.jsonl"), member="dev.json", download=_TWO_WIKI),
        },
        formats.two_wiki,
        "https://github.com/Alab-NII/2wikimultihop",
        "Apache-2.0",
    ),
    _question(
        "musique",
        {
            "train": Split(
                ("musique_ans_v1.0_train.jsonl", "train.jsonl"),
                member="data/musique_ans_v1.0_train.jsonl",
                download=Download(
                    _MUSIQUE + "musique_ans_v1.0_train.jsonl",
                    241_046_755,
                    "83a75b1e11e4e9bb8f8308e72ac40ca617ae4431b3a0d955b61cab259248490a",
                ),
            ),
            "test": Split(
                ("musique_ans_v1.0_dev.jsonl", "dev.jsonl"),
                member="data/musique_ans_v1.0_dev.jsonl",
                download=Download(
                    _MUSIQUE + "musique_ans_v1.0_dev.jsonl",
                    30_439_728,
                    "15fa63794d18a94ce12411aca6e2327e65b6e83b0b1490efab3f1962e48abf3b",
                ),
            ),
        },
        formats.musique,
        "https://github.com/StonyBrookNLP/musique",
        "CC BY 4.0",
    ),
    _question(
        "bamboogle",
        {
            "test": Split(
                ("bamboogle.json", "test.jsonl"),
                download=Download(
                    "https://raw.githubusercontent.com/RUCAIBox/SimpleDeepSearcher/"
                    "da768ccb8119c7fb9e1b05f4d0cb54c56e613394/data/bamboogle.json",
                    27_647,
                    "96544d11643cafb71c5212ffb5343cb6d5064aa5d553a6445de187ab6f151eeb",
                ),
            )
        },
        formats.bamboogle,
        "https://github.com/ofirpress/self-ask",
        "MIT",
    ),
    *map(_bfcl, ("base", "long_context", "miss_func", "miss_param")),
)

SOURCES: Mapping[str, Source] = {source.name: source for source in _ALL}


def find(name: str) -> Source:
    """The source of that name. Raises DataError, with all names, for one that is not in the table."""
    if name not in SOURCES:
        raise DataError(f"no data set is called {name!r}; there are {', '.join(SOURCES)}")
    return SOURCES[name]
