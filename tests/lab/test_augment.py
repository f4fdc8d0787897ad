"""Augmentation by itself: where crops lie, what is turned, recoloured, pasted and blended."""

import pytest
import torch
import torch.nn.functional as F

from gft.lab.data import augment as augmentation
from gft.lab.data import dataset


def test_crops_lie_inside_the_image_and_have_the_promised_areas():
    maps = augmentation.random_crops(4000, True, dataset.seeded("test", 1))
    width, height = maps[:, 0, 0].abs(), maps[:, 1, 1]
    assert (maps[:, 0, 2].abs() + width).max() <= 1 + 1e-6
    assert (maps[:, 1, 2].abs() + height).max() <= 1 + 1e-6
    assert 0.3 < (width * height).min() < 0.36
    assert (width * height).max() > 0.98
    assert 0.74 < (width / height).min() < 0.77
    assert 1.3 < (width / height).max() < 1.34
    assert (maps[:, 0, 0] < 0).float().mean() == pytest.approx(0.5, abs=0.03)
    assert (augmentation.random_crops(400, False, dataset.seeded("test", 1))[:, 0, 0] > 0).all()


def test_jitters_turn_zoom_and_shift_within_their_bounds():
    maps = augmentation.random_jitters(4000, dataset.seeded("test", 2))
    zoom = torch.linalg.det(maps[:, :, :2]).sqrt()
    turn = torch.atan2(maps[:, 1, 0], maps[:, 0, 0]).rad2deg()
    for values, most in ((zoom - 1, 0.12), (turn, 12), (maps[:, 0, 2] / 2, 0.1), (maps[:, 1, 2] / 2, 0.1)):
        assert 0.98 * most < values.abs().max() <= most * (1 + 1e-5)
        assert abs(values.mean()) < 0.03 * most


def test_resampling_through_the_whole_frame_changes_nothing_and_mirrors_exactly():
    images = torch.randn(3, 2, 5, 7)
    maps = torch.tensor([[1.0, 0, 0], [0, 1, 0]]).repeat(3, 1, 1)
    torch.testing.assert_close(augmentation.resample(images, maps), images)
    maps[:, 0, 0] = -1
    torch.testing.assert_close(augmentation.resample(images, maps), images.flip(-1))
    maps = torch.tensor([[0.5, 0, -0.5], [0, 0.5, 0.5]])  # the quarter at the bottom left
    quarters = torch.arange(4.0).view(2, 2).kron(torch.ones(4, 4))
    quarter = augmentation.resample(quarters[None, None], maps[None])
    assert quarter[0, 0, 1:, :-1].unique().tolist() == [2.0]


def test_the_middle_of_an_image_is_its_middle():
    image = torch.zeros(1, 1, 16, 16)
    image[..., 4:12, 4:12] = torch.arange(1.0, 65).view(8, 8) / 64
    half = augmentation.middle(image.expand(2, 3, -1, -1), 0.5)
    assert half.shape == (2, 3, 16, 16)
    # Twice as large: the mean of each two by two is the pixel it was, but at the edge, where it fades into the frame.
    torch.testing.assert_close(F.avg_pool2d(half, 2)[1, 2, 1:-1, 1:-1], image[0, 0, 5:11, 5:11])
    torch.testing.assert_close(augmentation.middle(image, 1.0), image)


def test_recolouring_is_lightness_contrast_and_distance_from_grey():
    images = torch.randn(4, 3, 5, 6)
    changes = torch.tensor([[0.0, 1, 0, 0], [0, 0, -1, 0], [0, 0, 0, 0.5]])
    same_one, lighter, flatter, brighter = augmentation.recoloured(images, changes)
    torch.testing.assert_close(same_one, images[0])
    torch.testing.assert_close(lighter, images[1] + 0.4)
    torch.testing.assert_close(flatter - flatter.mean(), 0.6 * (images[2] - images[2].mean()))
    torch.testing.assert_close(brighter - brighter.mean(0), 1.2 * (images[3] - images[3].mean(0)))
    torch.testing.assert_close(brighter.mean(0), images[3].mean(0))


def test_a_piece_is_pasted_where_its_box_is():
    images, shares = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 5), torch.eye(3)
    boxes = torch.tensor([[1, 3, 2, 5], [0, 0, 0, 5], [0, 4, 0, 5]])  # a part, none, all
    some, classes = augmentation.mixed(images, shares, boxes)
    assert some[0, 0].tolist() == some[0, 1].tolist() == [[0] * 5, [0, 0, 2, 2, 2], [0, 0, 2, 2, 2], [0] * 5]
    assert (some[1] == 1).all()
    assert (some[2] == 1).all()
    torch.testing.assert_close(classes, torch.tensor([[0.7, 0, 0.3], [0, 1, 0], [0, 1, 0]]))


def test_boxes_lie_inside_the_image_and_half_are_empty():
    top, bottom, left, right = augmentation.random_boxes(4000, 20, 30, dataset.seeded("test", 3)).t()
    assert top.min() == left.min() == 0
    assert bottom.max() == 20
    assert right.max() == 30
    assert (top <= bottom).all()
    assert (left <= right).all()
    assert ((top == bottom) | (left == right)).float().mean() == pytest.approx(0.5, abs=0.05)


def test_another_image_shines_through_as_much_as_is_not_kept():
    images, shares = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 4, 5), torch.eye(3)
    some, classes = augmentation.blended(images, shares, torch.tensor([1.0, 0.5, 0.75]))
    for image, value in zip(some, (0.0, 1.5, 1.5), strict=True):
        assert (image == value).all()
    torch.testing.assert_close(classes, torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5], [0.25, 0, 0.75]]))


def test_half_of_the_images_are_blended_and_keep_at_least_half_of_themselves():
    kept = augmentation.random_blends(4000, dataset.seeded("test", 4))
    assert (kept == 1).float().mean() == pytest.approx(0.5, abs=0.05)
    assert 0.5 <= kept.min() < 0.51
    assert kept[kept < 1].mean() == pytest.approx(0.75, abs=0.01)
