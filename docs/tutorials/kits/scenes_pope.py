"""Functions of the lmms-eval task `scenes_pope.yaml`."""

from pathlib import Path

from PIL import Image


def images(doc):
    return [Image.open(Path("scenes/val2014") / doc["image"]).convert("RGB")]


def scored(doc, answers):
    return {"accuracy": float(answers[0].lower().startswith(doc["label"]))}
