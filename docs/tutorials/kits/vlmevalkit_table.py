"""Write the questions about generated scenes to the table `scenes_POPE.tsv` of VLMEvalKit."""

import base64
import json
from pathlib import Path

import pandas as pd

rows = [json.loads(line) for line in Path("scenes/pope/coco_pope_adversarial.json").read_text().splitlines()]
table = pd.DataFrame(
    {
        "index": range(len(rows)),
        "image": [base64.b64encode((Path("scenes/val2014") / row["image"]).read_bytes()).decode() for row in rows],
        "question": [row["text"] for row in rows],
        "answer": [row["label"].capitalize() for row in rows],
        "category": "adversarial",
    }
)
table.to_csv("scenes_POPE.tsv", sep="\t", index=False)
