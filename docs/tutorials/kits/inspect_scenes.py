"""A task of inspect_ai: POPE's questions about generated scenes in the folder `scenes`."""

import base64
import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText
from inspect_ai.scorer import match
from inspect_ai.solver import generate


def sample(row):
    image = base64.b64encode((Path("scenes/val2014") / row["image"]).read_bytes()).decode()
    content = [ContentImage(image=f"data:image/png;base64,{image}"), ContentText(text=row["text"])]
    return Sample(input=[ChatMessageUser(content=content)], target=row["label"], id=row["question_id"])


@task
def scenes_pope():
    rows = [json.loads(line) for line in Path("scenes/pope/coco_pope_adversarial.json").read_text().splitlines()]
    return Task(dataset=[sample(row) for row in rows], solver=[generate()], scorer=match(location="begin"))
