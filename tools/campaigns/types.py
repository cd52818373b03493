"""Further model types of transformers at small sizes, for :mod:`tools.campaigns.others`."""

from __future__ import annotations

_SIZES = "num_hidden_layers=2&hidden_size=32&num_attention_heads=4"
_TOWER = f"{_SIZES}&intermediate_size=64"
_TEXT = f"{_TOWER}&vocab_size=96"
_TEXT2 = f"{_TEXT}&num_key_value_heads=2"
_MIXTURE = f"{_TEXT2}&num_experts=4&num_experts_per_tok=2&moe_intermediate_size=32&head_dim=8"
_BERT = f"{_TEXT}&max_position_embeddings=40"
_GPT = "n_layer=2&n_embd=32&n_head=4&vocab_size=96&n_positions=32"
_PAIR = (
    "&".join(
        f"{side}_{key}={value}"
        for side in ("encoder", "decoder")
        for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    )
    + "&d_model=32"
)
_SEQ2SEQ = f"{_PAIR}&vocab_size=96&max_position_embeddings=40"
_T5 = "num_layers=2&d_model=32&d_kv=8&num_heads=4&d_ff=64&vocab_size=96"
_IMAGE = "image_size=16&patch_size=4&num_labels=5"
_HEADS = '"num_hidden_layers":2,"hidden_size":32,"num_attention_heads":4,"intermediate_size":64'
_TEXT_TOWER = f'{{{_HEADS},"vocab_size":96,"max_position_embeddings":18}}'
_IMAGE_TOWER = f'{{{_HEADS},"image_size":16,"patch_size":4}}'
_SEEN = f'vision_config={{"model_type":"clip_vision_model",{_HEADS},"image_size":8,"patch_size":4}}'
_WAVE = "conv_dim=[16,16]&conv_stride=[5,2]&conv_kernel=[10,3]&num_feat_extract_layers=2"
_WAVES = f"{_WAVE}&num_conv_pos_embeddings=8&num_conv_pos_embedding_groups=2&mask_time_prob=0.0"
_LATENT = (
    "n_routed_experts=4&num_experts_per_tok=2&moe_intermediate_size=32&n_shared_experts=1&first_k_dense_replace=1"
    "&q_lora_rank=16&kv_lora_rank=16&qk_nope_head_dim=8&qk_rope_head_dim=8&v_head_dim=8"
)
_MAMBA = "mamba_d_state=8&mamba_d_conv=4&mamba_expand=2"


def _words(kind: str) -> str:
    """The text part of a model of images and text."""
    return f'text_config={{"model_type":"{kind}",{_HEADS},"num_key_value_heads":2,"vocab_size":96,"head_dim":8}}'


TYPES: dict[str, str] = {
    # decoders
    "opt": f"{_SIZES}&ffn_dim=64&vocab_size=96&max_position_embeddings=32&word_embed_proj_dim=32",
    "gptj": f"{_GPT}&rotary_dim=4",
    "gpt_bigcode": _GPT,
    "gpt_neo": "hidden_size=32&num_layers=2&num_heads=4&vocab_size=96&max_position_embeddings=32&window_size=8"
    '&attention_types=[[["global","local"],1]]',
    "codegen": f"{_GPT}&n_ctx=32&rotary_dim=4",
    "falcon": f"{_SIZES}&vocab_size=96&num_kv_heads=2&new_decoder_architecture=true",
    "phi": _TEXT2,
    "phi3": f"{_TEXT2}&pad_token_id=0",
    "qwen2": _TEXT2,
    "qwen2_moe": f"{_TEXT2}&moe_intermediate_size=32&shared_expert_intermediate_size=64&num_experts=4"
    "&num_experts_per_tok=2",
    "gemma2": f"{_TEXT2}&head_dim=8&sliding_window=8",
    "gemma3_text": f"{_TEXT2}&head_dim=8&sliding_window=8",
    "olmo": _TEXT2,
    "olmo2": _TEXT2,
    "olmoe": f"{_TEXT2}&num_experts=4&num_experts_per_tok=2",
    "cohere": _TEXT2,
    "cohere2": f"{_TEXT2}&head_dim=8&sliding_window=8",
    "starcoder2": _TEXT2,
    "stablelm": _TEXT2,
    "granite": _TEXT2,
    "granitemoe": f"{_TEXT2}&num_local_experts=4&num_experts_per_tok=2",
    "nemotron": f"{_TEXT2}&head_dim=8",
    "glm": f"{_TEXT2}&head_dim=8&pad_token_id=0",
    "glm4": f"{_TEXT2}&head_dim=8&pad_token_id=0",
    "smollm3": f"{_TEXT2}&pad_token_id=0",
    "persimmon": _TEXT,
    "llama4_text": f"{_TEXT2}&head_dim=8&intermediate_size_mlp=64&num_local_experts=4&attention_chunk_size=8",
    "gpt_oss": f"{_TEXT2}&head_dim=8&num_local_experts=4&num_experts_per_tok=2&sliding_window=8",
    "exaone4": f"{_TEXT2}&sliding_window=8",
    "ministral": f"{_TEXT2}&head_dim=8&sliding_window=8",
    "helium": f"{_TEXT2}&head_dim=8",
    "ernie4_5": f"{_TEXT2}&head_dim=8",
    "seed_oss": f"{_TEXT2}&head_dim=8",
    "hunyuan_v1_dense": f"{_TEXT2}&head_dim=8",
    "dbrx": 'd_model=32&n_heads=4&n_layers=2&vocab_size=96&max_seq_len=32&attn_config={"kv_n_heads":2,"clip_qkv":8,"rope_theta":10000.0}'
    '&ffn_config={"ffn_hidden_size":64,"moe_num_experts":4,"moe_top_k":2,"hidden_size":32}',
    "xglm": "d_model=32&ffn_dim=64&num_layers=2&attention_heads=4&vocab_size=96&max_position_embeddings=32",
    "ctrl": "n_layer=2&n_embd=32&n_head=4&dff=64&vocab_size=96&n_positions=32",
    "openai-gpt": _GPT,
    "xlnet": "n_layer=2&d_model=32&n_head=4&d_inner=64&vocab_size=96",
    "biogpt": f"{_TEXT}&max_position_embeddings=32",
    "minicpm3": f"{_TEXT}&num_key_value_heads=4",
    # recurrences and their mixtures with attention
    "jamba": f"{_TEXT2}&num_experts=2&num_experts_per_tok=1&attn_layer_period=2&attn_layer_offset=1&{_MAMBA}"
    "&mamba_dt_rank=4&use_mamba_kernels=false",
    "mamba": "hidden_size=32&num_hidden_layers=2&state_size=8&time_step_rank=4&vocab_size=96",
    "mamba2": "hidden_size=32&num_hidden_layers=2&state_size=8&num_heads=8&head_dim=8&n_groups=2&chunk_size=8"
    "&vocab_size=96",
    "rwkv": "hidden_size=32&num_hidden_layers=2&attention_hidden_size=32&intermediate_size=64&context_length=32"
    "&vocab_size=96",
    "recurrent_gemma": f"{_TEXT2}&head_dim=8&lru_width=32&attention_window_size=8"
    '&block_types=["recurrent","attention"]',
    "bamba": f"{_TEXT2}&mamba_n_heads=8&mamba_d_head=8&mamba_d_state=8&mamba_chunk_size=8&attn_layer_indices=[1]",
    "falcon_h1": f"{_TEXT2}&mamba_d_ssm=32&mamba_n_heads=4&mamba_d_head=8&mamba_d_state=8&mamba_chunk_size=8",
    # encoders
    "roberta": _BERT,
    "distilbert": "dim=32&n_layers=2&n_heads=4&hidden_dim=64&vocab_size=96&max_position_embeddings=40",
    "albert": f"{_BERT}&embedding_size=16",
    "electra": f"{_BERT}&embedding_size=16",
    "deberta": _BERT,
    "deberta-v2": _BERT,
    "mpnet": _BERT,
    "camembert": _BERT,
    "xlm-roberta": _BERT,
    "layoutlm": _BERT,
    "longformer": f"{_BERT}&attention_window=4",
    "big_bird": f"{_BERT}&block_size=4&num_random_blocks=1",
    "modernbert": f"{_TEXT}&pad_token_id=0&cls_token_id=1&sep_token_id=2&local_attention=8",
    "nystromformer": f"{_BERT}&num_landmarks=4&segment_means_seq_len=16&conv_kernel_size=3",
    "funnel": "block_sizes=[1,1]&num_decoder_layers=1&d_model=32&n_head=4&d_head=8&d_inner=64&vocab_size=96",
    "fnet": "num_hidden_layers=2&hidden_size=32&intermediate_size=64&vocab_size=96&max_position_embeddings=40",
    "convbert": f"{_BERT}&embedding_size=16",
    "rembert": f"{_BERT}&input_embedding_size=16&output_embedding_size=16",
    "squeezebert": f"{_BERT}&embedding_size=32",
    # encoders with decoders
    "bart": _SEQ2SEQ,
    "mbart": _SEQ2SEQ,
    "pegasus": _SEQ2SEQ,
    "marian": f"{_SEQ2SEQ}&decoder_vocab_size=96&pad_token_id=95",
    "m2m_100": _SEQ2SEQ,
    "blenderbot": _SEQ2SEQ,
    "led": f"{_PAIR}&vocab_size=96&max_encoder_position_embeddings=40&max_decoder_position_embeddings=40"
    "&attention_window=4",
    "mt5": _T5,
    "umt5": _T5,
    "longt5": _T5,
    "switch_transformers": f"{_T5}&num_experts=4&num_sparse_encoder_layers=1&num_sparse_decoder_layers=1",
    "prophetnet": "hidden_size=32&encoder_ffn_dim=64&decoder_ffn_dim=64&num_encoder_layers=2&num_decoder_layers=2"
    "&num_encoder_attention_heads=4&num_decoder_attention_heads=4&vocab_size=96&max_position_embeddings=40",
    # images and video
    "deit": f"{_TOWER}&{_IMAGE}",
    "beit": f"{_TOWER}&{_IMAGE}",
    "data2vec-vision": f"{_TOWER}&{_IMAGE}",
    "dinov2": f"{_SIZES}&mlp_ratio=2&{_IMAGE}",
    "vit_mae": f"{_TOWER}&image_size=16&patch_size=4&decoder_num_attention_heads=4&decoder_hidden_size=32"
    "&decoder_num_hidden_layers=1&decoder_intermediate_size=64",
    "swin": "image_size=32&patch_size=2&embed_dim=8&depths=[2,2]&num_heads=[2,4]&window_size=4&num_labels=5",
    "swinv2": "image_size=32&patch_size=2&embed_dim=8&depths=[2,2]&num_heads=[2,4]&window_size=4&num_labels=5"
    "&pretrained_window_sizes=[0,0]",
    "convnextv2": "hidden_sizes=[8,16]&depths=[1,1]&num_stages=2&image_size=32&num_labels=5",
    "mobilenet_v1": "image_size=32&depth_multiplier=0.25&num_labels=5",
    "mobilenet_v2": "image_size=32&depth_multiplier=0.25&num_labels=5",
    "efficientnet": "image_size=32&width_coefficient=0.25&depth_coefficient=0.1&hidden_dim=320&num_labels=5",
    "regnet": "embedding_size=8&hidden_sizes=[8,16]&depths=[1,1]&groups_width=4&num_labels=5",
    "segformer": "num_encoder_blocks=2&depths=[1,1]&sr_ratios=[8,4]&hidden_sizes=[16,32]&patch_sizes=[7,3]"
    "&strides=[4,4]&num_attention_heads=[1,2]&mlp_ratios=[2,2]&decoder_hidden_size=32&num_labels=5",
    "poolformer": "depths=[1,1]&hidden_sizes=[8,16]&patch_sizes=[7,3]&strides=[8,2]&padding=[2,1]"
    "&num_encoder_blocks=2&num_labels=5",
    "levit": "image_size=64&patch_size=16&hidden_sizes=[16,32,48]&num_attention_heads=[2,4,6]&depths=[1,1,1]"
    "&key_dim=[4,4,4]&mlp_ratio=[2,2,2]&attention_ratio=[2,2,2]&num_labels=5",
    "cvt": "embed_dim=[16,32,32]&num_heads=[1,2,2]&depth=[1,2,3]&num_labels=5",
    "pvt": "image_size=32&num_encoder_blocks=2&depths=[1,1]&sequence_reduction_ratios=[2,1]&hidden_sizes=[16,32]"
    "&patch_sizes=[4,2]&strides=[4,2]&num_attention_heads=[1,2]&mlp_ratios=[2,2]&num_labels=5",
    "bit": "embedding_size=8&hidden_sizes=[16,32]&depths=[1,1]&num_groups=4&num_labels=5",
    "focalnet": "image_size=32&patch_size=4&embed_dim=16&hidden_sizes=[16,32]&depths=[1,1]&focal_levels=[2,2]"
    "&focal_windows=[3,3]&num_labels=5",
    "videomae": f"{_TOWER}&image_size=16&patch_size=4&num_frames=4&num_labels=5",
    "timesformer": f"{_TOWER}&image_size=16&patch_size=4&num_frames=4&num_labels=5",
    # sound, two towers, series
    "wav2vec2": f"{_TEXT}&{_WAVES}",
    "wav2vec2-conformer": f"{_TEXT}&{_WAVES}",
    "wavlm": f"{_TEXT}&{_WAVES}",
    "audio-spectrogram-transformer": f"{_TOWER}&patch_size=4&max_length=16&num_mel_bins=8&frequency_stride=4"
    "&time_stride=4&num_labels=5",
    "hubert": f"{_TEXT}&{_WAVES}",
    "speech_to_text": f"{_PAIR}&vocab_size=96&max_source_positions=40&max_target_positions=40"
    "&input_feat_per_channel=8&conv_channels=16&conv_kernel_sizes=[3]&num_conv_layers=1",
    "speecht5": f"{_PAIR.replace('d_model', 'hidden_size')}&{_WAVES}&vocab_size=96",
    "siglip": f"text_config={_TEXT_TOWER}&vision_config={_IMAGE_TOWER}",
    "chinese_clip": f"text_config={_TEXT_TOWER}&vision_config={_IMAGE_TOWER}&projection_dim=16",
    "blip": f"text_config={_TEXT_TOWER}&vision_config={_IMAGE_TOWER}&projection_dim=16&image_text_hidden_size=32",
    "git": f"{_TEXT}&max_position_embeddings=40&vision_config={_IMAGE_TOWER}",
    "vilt": f"{_BERT}&image_size=16&patch_size=4",
    "bridgetower": f"{_SIZES}&text_config={_TEXT_TOWER}"
    '&vision_config={"num_hidden_layers":2,"hidden_size":128,"image_size":16,"patch_size":4}',
    "llava": f"{_words('llama')}&{_SEEN}&image_token_index=95",
    "vipllava": f"{_words('llama')}&{_SEEN}&image_token_index=95&vision_feature_layers=[-1,-2]",
    "paligemma": f"{_words('gemma')}&{_SEEN.replace('clip', 'siglip')}&projection_dim=32&image_token_index=95",
    "aya_vision": f"{_words('cohere2')}&{_SEEN.replace('clip', 'siglip')}&image_token_index=95&downsample_factor=2"
    "&vision_feature_layer=-1",
    "cohere2_vision": f"{_words('cohere2')}&{_SEEN.replace('clip', 'siglip')}&image_token_id=95&downsample_factor=2",
    "internvl": f"{_words('qwen2')}&image_token_id=95&downsample_ratio=0.5"
    f'&vision_config={{{_HEADS},"image_size":[8,8],"patch_size":[4,4]}}',
    "idefics": f"{_TEXT}&vision_config={_IMAGE_TOWER}",
    "patchtst": "num_hidden_layers=2&d_model=32&num_attention_heads=4&ffn_dim=64&context_length=16&patch_length=4"
    "&patch_stride=4",
    "time_series_transformer": f"{_PAIR}&prediction_length=4&context_length=8&lags_sequence=[1,2]&num_time_features=1",
    "informer": f"{_PAIR}&prediction_length=4&context_length=8&lags_sequence=[1,2]&num_time_features=1&distil=false",
    "decision_transformer": "hidden_size=32&n_layer=2&n_head=4&state_dim=4&act_dim=2&max_ep_len=32&n_positions=64",
    # more decoders
    "phimoe": f"{_TEXT2}&num_local_experts=4&num_experts_per_tok=2",
    "jetmoe": "num_hidden_layers=2&hidden_size=32&num_key_value_heads=2&kv_channels=8&intermediate_size=64&vocab_size=96"
    "&num_local_experts=4&num_experts_per_tok=2",
    "olmo3": f"{_TEXT2}&sliding_window=8",
    "deepseek_v2": f"{_TEXT}&{_LATENT}",
    "glm4_moe": f"{_TEXT2}&n_routed_experts=4&num_experts_per_tok=2&moe_intermediate_size=32&first_k_dense_replace=1",
    "qwen3_next": f"{_TEXT2}&head_dim=8&num_experts=4&num_experts_per_tok=2&moe_intermediate_size=32"
    "&shared_expert_intermediate_size=32&linear_num_value_heads=4&linear_num_key_heads=2&linear_key_head_dim=8"
    '&linear_value_head_dim=8&layer_types=["linear_attention","full_attention"]',
    "lfm2": f'{_TEXT2}&layer_types=["conv","full_attention"]',
    "granitemoehybrid": f"{_TEXT2}&num_local_experts=4&num_experts_per_tok=2&shared_intermediate_size=32"
    '&mamba_n_heads=8&mamba_d_head=8&mamba_d_state=8&mamba_chunk_size=8&layer_types=["mamba","attention"]',
    "granitemoeshared": f"{_TEXT2}&num_local_experts=4&num_experts_per_tok=2&shared_intermediate_size=32",
    "nemotron_h": f"{_TEXT2}&head_dim=8&mamba_num_heads=8&mamba_head_dim=8&ssm_state_size=8&n_groups=2&chunk_size=8",
    "falcon_mamba": "hidden_size=32&num_hidden_layers=2&state_size=8&time_step_rank=4&vocab_size=96",
    "zamba2": f"{_TEXT}&mamba_d_state=8&mamba_ngroups=1&n_mamba_heads=8&mamba_expand=2&chunk_size=8&num_mem_blocks=1"
    '&adapter_rank=8&layers_block_type=["mamba","hybrid"]',
    "apertus": _TEXT2,
    "arcee": f"{_TEXT2}&head_dim=8",
    "diffllama": _TEXT2,
    "bitnet": _TEXT2,
    "dots1": f"{_TEXT2}&n_routed_experts=4&num_experts_per_tok=2&moe_intermediate_size=32&n_shared_experts=1"
    "&first_k_dense_replace=1",
    "hunyuan_v1_moe": f"{_TEXT2}&head_dim=8&num_experts=4&moe_topk=2",
    "minimax": f"{_TEXT2}&head_dim=8&num_local_experts=4&num_experts_per_tok=2&block_size=8",
    "qwen3_5_text": f"{_TEXT2}&head_dim=8&linear_num_value_heads=4&linear_num_key_heads=2&linear_key_head_dim=8"
    '&linear_value_head_dim=8&layer_types=["linear_attention","full_attention"]',
    "gemma3n_text": f"{_TEXT2}&head_dim=8&vocab_size_per_layer_input=96&hidden_size_per_layer_input=8&num_kv_shared_layers=0"
    "&laurel_rank=8&sliding_window=8&altup_num_inputs=2&activation_sparsity_pattern=[0.0,0.0]"
    '&layer_types=["sliding_attention","full_attention"]',
    "modernbert-decoder": f"{_TEXT}&pad_token_id=0&cls_token_id=1&sep_token_id=2&local_attention=8",
    # more encoders, and encoders with decoders
    "roformer": f"{_BERT}&embedding_size=32",
    "megatron-bert": _BERT,
    "luke": f"{_BERT}&entity_vocab_size=32&entity_emb_size=16",
    "canine": f"{_SIZES}&intermediate_size=64&max_position_embeddings=40&num_hash_buckets=32&local_transformer_stride=8"
    "&upsampling_kernel_size=4&downsampling_rate=4",
    "perceiver": "num_latents=8&d_latents=32&d_model=32&num_blocks=1&num_self_attends_per_block=2"
    "&num_self_attention_heads=4&num_cross_attention_heads=4&vocab_size=96&max_position_embeddings=16",
    "reformer": "hidden_size=32&num_attention_heads=4&attention_head_size=8&feed_forward_size=64&vocab_size=96"
    "&max_position_embeddings=16&axial_pos_shape=[4,4]&axial_pos_embds_dim=[16,16]&is_decoder=false"
    '&attn_layers=["local","lsh"]&local_attn_chunk_length=4&lsh_attn_chunk_length=4&num_buckets=4',
    "esm": f"{_BERT}&pad_token_id=1&mask_token_id=2",
    "mobilebert": f"{_BERT}&embedding_size=16&intra_bottleneck_size=32&num_feedforward_networks=2",
    "ibert": _BERT,
    "flaubert": "n_layers=2&emb_dim=32&n_heads=4&vocab_size=96&max_position_embeddings=40",
    "xlm": "n_layers=2&emb_dim=32&n_heads=4&vocab_size=96&max_position_embeddings=40",
    "xmod": f'{_BERT}&languages=["en_XX"]&default_language=en_XX',
    "yoso": f"{_BERT}&use_expectation=true",
    "data2vec-text": _BERT,
    "plbart": _SEQ2SEQ,
    "bigbird_pegasus": f"{_PAIR}&vocab_size=96&max_position_embeddings=40&block_size=4&num_random_blocks=1",
    "nllb-moe": f"{_SEQ2SEQ}&num_experts=4&encoder_sparse_step=2&decoder_sparse_step=2",
    # more images, sound, two towers, series
    "yolos": f"{_TOWER}&image_size=[16,16]&patch_size=4&num_detection_tokens=4",
    "vit_msn": f"{_TOWER}&{_IMAGE}",
    "dinov2_with_registers": f"{_SIZES}&mlp_ratio=2&{_IMAGE}",
    "vitdet": f"{_SIZES}&mlp_ratio=2&image_size=16&patch_size=4&pretrain_image_size=16",
    "dpt": f"{_TOWER}&image_size=16&patch_size=4&backbone_out_indices=[0,0,1,1]&neck_hidden_sizes=[8,8,16,16]"
    "&fusion_hidden_size=16",
    "hiera": "image_size=[32,32]&patch_stride=[4,4]&embed_dim=16&depths=[1,1]&num_heads=[1,2]&num_query_pool=1"
    "&query_stride=[2,2]&masked_unit_size=[4,4]&masked_unit_attention=[true,false]&num_labels=5",
    "mobilevit": "image_size=32&hidden_sizes=[16,24,32]&neck_hidden_sizes=[8,8,16,16,24,32,32]&num_labels=5",
    "swiftformer": "image_size=64&depths=[1,1,1,1]&embed_dims=[8,16,24,32]&num_labels=5",
    "pvt_v2": "image_size=32&depths=[1,1,1,1]&hidden_sizes=[8,16,16,32]&num_attention_heads=[1,2,2,4]"
    "&mlp_ratios=[2,2,2,2]&num_labels=5",
    "vivit": f"{_TOWER}&image_size=16&num_frames=4&tubelet_size=[2,4,4]&num_labels=5",
    "upernet": "hidden_size=16&pool_scales=[1,2]",
    "detr": "d_model=32&encoder_layers=1&decoder_layers=1&encoder_attention_heads=4&decoder_attention_heads=4"
    "&encoder_ffn_dim=64&decoder_ffn_dim=64&num_queries=4"
    '&backbone_config={"model_type":"resnet","embedding_size":8,"hidden_sizes":[8,16],"depths":[1,1],"out_features":["stage2"]}',
    "mask2former": "feature_size=32&mask_feature_size=32&hidden_dim=32&num_queries=4&num_attention_heads=4"
    "&encoder_layers=1&decoder_layers=2&dim_feedforward=64&encoder_feedforward_dim=64"
    '&backbone_config={"model_type":"swin","image_size":224,"embed_dim":8,"depths":[1,1,1,1],"num_heads":[1,1,2,2]'
    ',"window_size":7,"out_features":["stage1","stage2","stage3","stage4"]}',
    "owlvit": f"text_config={_TEXT_TOWER}&vision_config={_IMAGE_TOWER}&projection_dim=16",
    "altclip": f"text_config={_TEXT_TOWER}&vision_config={_IMAGE_TOWER}&projection_dim=16",
    "groupvit": f"text_config={_TEXT_TOWER}&projection_dim=16&projection_intermediate_dim=32"
    '&vision_config={"hidden_size":32,"depths":[1,1,1],"num_hidden_layers":3,"num_group_tokens":[4,2,0]'
    ',"num_output_groups":[4,2,0],"num_attention_heads":4,"image_size":16,"patch_size":4,"intermediate_size":64}',
    "clap": f"text_config={_TEXT_TOWER}&projection_dim=16"
    '&audio_config={"num_mel_bins":16,"spec_size":32,"patch_size":4,"patch_stride":[4,4],"depths":[1,1]'
    ',"num_attention_heads":[2,4],"patch_embeds_hidden_size":16,"hidden_size":32,"window_size":4,"num_hidden_layers":2}',
    "blip-2": f"vision_config={_IMAGE_TOWER}&num_query_tokens=4",
    "data2vec-audio": f"{_TEXT}&{_WAVES}",
    "sew": f"{_TEXT}&{_WAVES}",
    "unispeech": f"{_TEXT}&{_WAVES}",
    "encodec": "num_filters=4&hidden_size=16&codebook_size=16&num_residual_layers=1&upsampling_ratios=[4,2]",
    "moonshine": "hidden_size=32&intermediate_size=64&encoder_num_hidden_layers=2&decoder_num_hidden_layers=2"
    "&encoder_num_attention_heads=4&decoder_num_attention_heads=4&vocab_size=96",
    "seamless_m4t": "hidden_size=32&encoder_layers=1&decoder_layers=1&speech_encoder_layers=1&vocab_size=96"
    "&t2u_encoder_layers=1&t2u_decoder_layers=1",
    "musicgen": 'text_encoder={"model_type":"t5","num_layers":2,"d_model":32,"d_kv":8,"num_heads":4,"d_ff":64,"vocab_size":96}'
    '&audio_encoder={"model_type":"encodec","num_filters":4,"hidden_size":16,"codebook_size":96}'
    f'&decoder={{"vocab_size":96,"num_codebooks":1,"ffn_dim":64,"pad_token_id":0,"bos_token_id":0,{_HEADS}}}',
    "patchtsmixer": "context_length=16&patch_length=4&patch_stride=4&d_model=16&num_layers=2",
    "autoformer": f"{_PAIR}&prediction_length=4&context_length=8&lags_sequence=[1,2]&num_time_features=1"
    "&label_length=4&moving_average=5",
    # released in 2025 and 2026
    "doge": _TEXT2,
    "eurobert": f"{_TEXT2}&pad_token_id=0",
    "nanochat": f"{_TEXT2}&head_dim=8",
    "vaultgemma": f"{_TEXT2}&head_dim=8&sliding_window=8&query_pre_attn_scalar=8",
    "jais2": f"{_TEXT2}&head_dim=8",
    "flex_olmo": f"{_TEXT2}&num_experts=4&num_experts_per_tok=2&pad_token_id=0",
    "lfm2_moe": f'{_MIXTURE}&num_dense_layers=1&layer_types=["conv","full_attention"]',
    "olmo_hybrid": f"{_TEXT}&num_key_value_heads=4&pad_token_id=0&linear_num_value_heads=4&linear_num_key_heads=4"
    '&linear_key_head_dim=8&linear_value_head_dim=8&layer_types=["linear_attention","full_attention"]',
    "exaone_moe": f"{_MIXTURE}&n_group=1&topk_group=1&num_shared_experts=1&first_k_dense_replace=1",
    "afmoe": f"{_MIXTURE}&num_dense_layers=1&sliding_window=8",
    "granitemoe_swa": f"{_TEXT2}&num_local_experts=4&num_experts_per_tok=2&sliding_window=8",
    "laguna": _MIXTURE,
    "mellum": _MIXTURE,
    "solar_open": f"{_SIZES}&vocab_size=96&num_key_value_heads=2&head_dim=8&n_routed_experts=4&num_experts_per_tok=2"
    "&moe_intermediate_size=32&n_shared_experts=1",
    "gte": _BERT,
    "jina_embeddings_v3": _BERT,
    "nomic_bert": _BERT,
    "dinov3_vit": f"{_TOWER}&image_size=16&patch_size=4",
}
"""The settings of each model type."""
