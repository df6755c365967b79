package io.github.omnigrpc;

import io.github.omnigrpc.v1.Completed;
import io.github.omnigrpc.v1.EffectiveParams;
import io.github.omnigrpc.v1.GenerationStats;
import io.github.omnigrpc.v1.Warning;
import java.util.List;

/** What a job that succeeded has made. */
public final class GenerationResult {
    private final String jobId;
    private final Completed completed;
    private final List<Output> outputs;

    GenerationResult(String jobId, Completed completed, List<Output> outputs) {
        this.jobId = jobId;
        this.completed = completed;
        this.outputs = List.copyOf(outputs);
    }

    /** The job. */
    public String jobId() {
        return jobId;
    }

    /** The files, by index. */
    public List<Output> outputs() {
        return outputs;
    }

    /** The settings that were used: size, steps, seeds, guidance. */
    public EffectiveParams effective() {
        return completed.getEffective();
    }

    /** What was adjusted, and options without effect. */
    public List<Warning> warnings() {
        return completed.getWarningsList();
    }

    /** Where the time went. */
    public GenerationStats stats() {
        return completed.getStats();
    }
}
