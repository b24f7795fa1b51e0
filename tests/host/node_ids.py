"""The nodes of the pack, as people's workflows name them: an id that changes breaks each workflow that has it."""

NODE_IDS = [
    "OneDiffOptimize",
    "OneDiffModelSpeedup",
    "OneDiffVAESpeedup",
    "OneDiffControlNetSpeedup",
    "OneDiffCLIPSpeedup",
    "OneDiffStepCache",
    "OneDiffSaveCompiledGraph",
    "OneDiffLoadCompiledGraph",
    "OneDiffShapeBucket",
    "OneDiffWarmUp",
    "OneDiffReport",
    "OneDiffOldCheckpointLoader",
    "OneDiffOldDiffusionModelLoader",
    "OneDiffOldControlNetLoader",
    "OneDiffOldModelSpeedup",
    "OneDiffOldNode",
]
