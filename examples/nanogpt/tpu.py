"""The environment in which JAX asks the TPU compiler without a TPU; to be set before JAX starts."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # it must neither look for a TPU nor for the cloud's metadata
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so nothing is locked
}
