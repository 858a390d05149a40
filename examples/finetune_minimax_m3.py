"""Fine-tuning of MiniMax-M3 with transformers, its indexer included. The model here is small and its weights random.

It needs transformers 5.17 or newer. Run it with: python examples/finetune_minimax_m3.py
"""

import torch
from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

import flashmsa.hf

flashmsa.hf.register()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = MiniMaxM3VLTextConfig(
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    dense_intermediate_size=256,
    layer_types=["full_attention", "minimax_m3_sparse"],
    mlp_layer_types=["dense", "dense"],
    index_n_heads=2,
    index_head_dim=64,
    index_block_size=64,
    index_topk_blocks=2,
    bos_token_id=None,
    eos_token_id=None,
)
# With a checkpoint: MiniMaxM3VLForCausalLM.from_pretrained(..., attn_implementation="flashmsa")
model = MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="flashmsa").to(device).train()
proxy = flashmsa.hf.enable_proxy_loss(model, weight=1.0)  # without it the indexer gets no gradient

with open(__file__, "rb") as file:
    ids = torch.tensor([list(file.read(512))], device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}, of it KL {proxy.loss.item():.4f}")
