"""The journal: a crash-safe recording of a run, to read, follow, and judge again. Needs no torch.

Format 1. A journal is one head file `rank{R}-attempt{A}.gwj` and, when it grows, numbered files after it,
`rank{R}-attempt{A}.00001.gwj` and so on, written by one process only. Each file is a sequence of frames
(`crash_safe_frames`: magic, salt, sequence, length, two checksums); each frame holds one payload (`payload`: a JSON
header and little-endian arrays), and each payload one entry:

    kind     written                         holds
    run      first in every file             RunInfo, rules, number of the file
    sites    before its first use in a file  names, kinds, numels, ndims, depths, groups of the S sites
    steps    each step, many to a frame      totals, group norms, loss, lr, loss scale, decision, own cost
    norms    first 1,000 steps, 200 either   norm[S], calls[S], coef[S], measured columns, histograms, firing
             side of an incident, while a    masks, and why this step was written (`reason`, `every`)
             rule fires, else 1 step in k
    norms_   in its stead, where several     the same of at most 64 steps that have the same columns, firing
      block  are written at once             rules and reason, and no histograms; reads back as `norms` of each
    events   each step with a transition     the rule events of the step
    saved    in the second after the state   some of these states, with the health of the weights then; again
             of an optimizer is taken        when a later look at the weights knows more of it; counts of all
    lost     after a gap                     how many records were not written, and why
    end      last, on an orderly close       number of records

Guarantees. An incident is acknowledged only when its `events` frame has been through fdatasync. A file is
only ever appended to; a failed write is cut off again. A sealed file may be replaced, by an atomic rename,
with a thinner copy of itself (fewer entries, none altered but for the cadence they state) or be deleted to
stay within the cap; the head never is. What belongs to one step is written within 1,024 steps of its scalars.
A Record waits up to 0.25 s for the journal's thread (or until 256 wait), its scalars then for up to 1 s (or until
there are 64 of them): where the disk keeps up, that is what SIGKILL costs.
Readers skip unknown kinds and keys, and step over damage.
"""

from gradwatch.journal.columnar_steps import StepRow, StepsEntry
from gradwatch.journal.crash_safe_frames import Damage
from gradwatch.journal.entries import (
    EndEntry,
    Entry,
    EventsEntry,
    LostEntry,
    RunEntry,
    SavedStatesEntry,
    SitesEntry,
)
from gradwatch.journal.norms_entry import NormsEntry
from gradwatch.journal.reader import JournalReader, read_journal
from gradwatch.journal.records_from_entries import RecordedStep

__all__ = [
    "Damage",
    "EndEntry",
    "Entry",
    "EventsEntry",
    "JournalReader",
    "LostEntry",
    "NormsEntry",
    "RecordedStep",
    "RunEntry",
    "SavedStatesEntry",
    "SitesEntry",
    "StepRow",
    "StepsEntry",
    "read_journal",
]
