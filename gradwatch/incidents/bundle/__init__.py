"""The bundle of an incident: one folder with all that was known of the step, to be read, sent and run again.

`snapshot_rules` says which rules want one; `incident_json` what is in it; `bundle_writer` makes the folder,
`bundle_reader` reads one that may come from anywhere. Nothing here runs code of a bundle: its document is JSON, its
tensors are safetensors.

    incident.json         everything that is not a tensor; `Document`, its version in `version`
    incident.md           the page that `gradwatch explain` prints
    tensors.safetensors   inputs, gradients, buffers, generators, norms by site; named by the document
"""

from __future__ import annotations
