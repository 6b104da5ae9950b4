"""Stands in for a list that the source distribution lacks: fields of every configuration, none at its default."""

config_common_kwargs = {"output_hidden_states": True, "return_dict": False, "dtype": "float16"}
config_common_kwargs |= {"chunk_size_feed_forward": 5, "is_encoder_decoder": True, "architectures": ["AnyModel"]}
config_common_kwargs |= {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}, "problem_type": "regression"}
