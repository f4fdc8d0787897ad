"""Imagenette: ten easy classes of ImageNet, 9,469 images to train on and 3,925 to validate, as fastai publishes them.

    imagenette2        the images as they are            imagenette2-160    their shorter side 160 pixels
    imagenette2-320    their shorter side 320 pixels     imagenette2-…      any other, if a folder has it

Each may be a folder, a .zip or a .tgz, in the data folder or its imagenette/. Its validation images serve as the test too.
"""

import re
from pathlib import Path

from gft.lab.data.dataset import Dataset
from gft.lab.data.folder import DataError, Source, data_folder, retrieve
from gft.lab.data.pictures import load_pictures

# The checksums are those that torchvision.datasets.Imagenette lists.
ARCHIVES = (Source("imagenette2-160.tgz", "e793b78cc4c9e9a4ccc0c1155377a412"),
            Source("imagenette2-320.tgz", "3df6f0d01a2c9592104656642f5e78a3"),
            Source("imagenette2.tgz", "fe2fc210e6bb7c5664d602c3cd71e612"))
IMAGENETTE = ARCHIVES[0]
IMAGENETTE_MIRRORS = ("https://s3.amazonaws.com/fast-ai-imageclas/",)
IMAGES = {"train": 9_469, "val": 3_925}
CLASSES = ("tench", "English springer", "cassette player", "chain saw", "church", "French horn", "garbage truck", "gas pump",
           "golf ball", "parachute")  # in the order of their folders' names, and so of their numbers
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
_NAME = re.compile(r"imagenette2(?:-(?P<pixels>\d+))?(?P<kind>|\.zip|\.tgz|\.tar\.gz)")


def find_imagenette(size: int = SIZE) -> Path | None:
    """The source that serves size x size best: the smallest not below it, else the largest; unpacked rather than packed."""
    choices = []
    for folder in (data_folder(), data_folder() / "imagenette"):
        for path in sorted(folder.glob("imagenette2*")):
            match = _NAME.fullmatch(path.name)
            if match is None or (match["kind"] == "") != path.is_dir():
                continue
            pixels = int(match["pixels"] or 10_000)
            choices.append((pixels < size, abs(pixels - size), match["kind"] != "", match["kind"] != ".zip", path))
    return min(choices)[-1] if choices else None


def fetch_imagenette(progress: bool = True, size: int = SIZE) -> Path:
    """Find Imagenette or download its 160-pixel version (99 MB) into the data folder, checksum checked."""
    folder = data_folder() / "imagenette"
    return find_imagenette(size) or retrieve(
        "Imagenette", IMAGENETTE, IMAGENETTE_MIRRORS, folder, progress,
        f"put fastai's {IMAGENETTE.name} into {folder}, or set GFT_DATA to a folder that has imagenette2*/")


def load_imagenette(size: int = SIZE) -> Dataset:
    """(n, 3, size, size) bytes, squeezed to a square: the whole image is kept, its aspect is not."""
    if not 8 <= size <= 1024:
        raise DataError(f"imagenette-{size}: give a size from 8 to 1024 pixels")
    source = fetch_imagenette(size=size)
    known = {archive.name.removesuffix(".tgz"): archive.md5 for archive in ARCHIVES}
    packed = re.fullmatch(r"(.*)(\.tgz|\.tar\.gz)", source.name)
    splits = load_pictures(source, size, known.get(packed[1]) if packed else None)
    classes = int(splits["train"][1].max()) + 1
    for split, number in IMAGES.items():  # unpacking that was interrupted would go unseen otherwise
        if len(splits[split][0]) != number or classes != len(CLASSES):
            raise DataError(f"{source} has {len(splits[split][0]):,} images of {classes} classes in {split}/ where "
                            f"Imagenette has {number:,} of {len(CLASSES)}; unpack or fetch it again")
    return Dataset(splits["train"], splits["val"], splits["val"], classes, IMAGENET_MEAN, IMAGENET_STD, flips=True)
