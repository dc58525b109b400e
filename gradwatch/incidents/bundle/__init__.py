"""The bundle of an incident: one folder with all that was known of the step, to be read, sent and run again.

`asked` says which rules want one; `document` what is in it; `writing` makes the folder, `reading` reads one that
may come from anywhere. Nothing here runs code of a bundle: its document is JSON, its tensors are safetensors.

    incident.json         everything that is not a tensor; `document.Document`, its version in `version`
    incident.md           the page that `gradwatch explain` prints
    tensors.safetensors   inputs, gradients, buffers, generators, norms by site; named by the document
"""

from __future__ import annotations
