"""What speculation did for one answer, in a few lines for people."""

from clients.outputs import SpeculationStats


def speculation_figures(stats: SpeculationStats) -> list[str]:
    """The figures of one choice, a fact a line; those of each step where the request was to have them."""
    if not stats.num_spec_steps:
        return ["no step verified drafts"]
    accepted = f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafts accepted"
    rate = f"{stats.draft_acceptance_rate:.0%}, {stats.mean_acceptance_length:.2f} tokens per step with drafts"
    steps = [f"{num_accepted}: {num_steps}" for num_accepted, num_steps in enumerate(stats.acceptance_histogram)]
    lines = [f"{accepted}, {rate}", f"steps by how many they accepted: {', '.join(steps)}"]
    if stats.proposed_per_step:
        pairs = zip(stats.accepted_per_step, stats.proposed_per_step, strict=True)
        lines.append(f"accepted/drafted of each: {' '.join(f'{kept}/{drafted}' for kept, drafted in pairs)}")
    if stats.is_synthetic:
        lines.append("accepted at configured rates: the text is not the model's")
    return lines
