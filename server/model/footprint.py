"""What a step cannot do without reading: the bound on its speed that the memory sets."""

from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a decoding step reads, in the types they are computed in.

    Attributes:
        weight_nbytes: once per step; all of them but the input embedding, of which it reads a few rows.
        kv_token_nbytes: K and V of one token over all layers.
    """

    weight_nbytes: int
    kv_token_nbytes: int

    @classmethod
    def of(cls, model: PreTrainedModel, kv_token_nbytes: int) -> "Footprint":
        """Of a loaded model whose weights are not packed yet. A mixture of experts counts with all of them."""
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if output is not embedding:
            nbytes -= embedding.nbytes
        return cls(nbytes, kv_token_nbytes)

    def step_nbytes(self, batch: int, context: float) -> float:
        """Bytes of a step over `batch` sequences of `context` tokens each, all of which are attended to."""
        return self.weight_nbytes + batch * context * self.kv_token_nbytes
