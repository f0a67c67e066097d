"""Benchmarks made from held-out scenes, written in the official file formats.

`revisit scenes build DIR --split usual|unusual --n N --seed S` writes this folder; nothing else is in it:

```
DIR/
  meta.json                                  {"split", "n", "seed", "generator"}: what made the folder
  scenes.jsonl                               one line per picture: {"image_id", "file_name", "place", "objects":
                                             [{"category", "noun", "colour" or null, "bbox" [x, y, w, h]}]}
  val2014/COCO_val2014_000000000001.png      the N pictures, image ids 1..N (RGB, 128 x 128)
  annotations/instances_val2014.json         COCO: images, categories (80 official ids and names), annotations
  annotations/captions_val2014.json          COCO: five captions per picture
  pope/coco_pope_random.json                 JSON lines {"question_id", "image", "text", "label"}: six questions a
  pope/coco_pope_popular.json                picture, three yes and three no, `image` a file name inside val2014/
  pope/coco_pope_adversarial.json
  hallusionbench/HallusionBench.json         official list (category "VD", subcategory "scene", strings throughout),
                                             `filename` "./VD/scene/3_0.png" relative to hallusionbench/
  hallusionbench/VD/scene/{set}_{figure}.png figure 0 the original, figure 1 the edited picture
  vqav2/v2_OpenEnded_mscoco_val2014_questions.json    official schema; image_id as above
  vqav2/v2_mscoco_val2014_annotations.json            official schema with ten answers a question
  mmmu/answer_dict_val.json                  {id: {"question_type": "multiple-choice", "ground_truth": "B"}}
  mmmu/questions.jsonl                       {"id", "question", "options" [str], "answer", "question_type",
                                             "subject", "images" [paths relative to DIR]}; ids validation_<Subject>_<n>
```

POPE names objects by the nouns that the captions use ("table" for the category `dining table`); all of them are CHAIR
synonyms of their category.
"""

from __future__ import annotations
