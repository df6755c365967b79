package io.github.omnigrpc;

import io.github.omnigrpc.v1.JobState;
import io.github.omnigrpc.v1.ListJobsRequest;
import java.time.Instant;
import java.util.Map;

/** Which jobs {@link OmniClient#listJobs(JobFilter)} returns: all that fit everything that is set, newest first. */
public final class JobFilter {
    private final ListJobsRequest.Builder request = ListJobsRequest.newBuilder();
    private int limit = 50;

    /** Most jobs; 50 where it is not set. */
    public JobFilter limit(int jobs) {
        if (jobs < 1) {
            throw OmniException.invalid("limit", "is " + jobs + ", expected 1 or more");
        }
        limit = jobs;
        return this;
    }

    /** Jobs in one of these states, by name: {@code running}, {@code failed}, ... */
    public JobFilter states(String... names) {
        for (String name : names) {
            var state = Names.find(JobState.getDescriptor(), name)
                    .orElseThrow(() -> OmniException.invalid("states", Names.rule(JobState.getDescriptor(), name)));
            request.addStates(JobState.valueOf(state));
        }
        return this;
    }

    /** Jobs that have all of these labels. */
    public JobFilter labels(Map<String, String> labels) {
        request.putAllLabelSelector(labels);
        return this;
    }

    /** Jobs of a model. */
    public JobFilter model(String name) {
        request.setModel(name);
        return this;
    }

    /** Jobs of a tenant, for callers who see several. */
    public JobFilter tenant(String name) {
        request.setTenant(name);
        return this;
    }

    /** Jobs that were made then or later. */
    public JobFilter createdFrom(Instant moment) {
        request.setCreatedFrom(Times.toProto(moment));
        return this;
    }

    /** Jobs that were made before. */
    public JobFilter createdBefore(Instant moment) {
        request.setCreatedBefore(Times.toProto(moment));
        return this;
    }

    int limit() {
        return limit;
    }

    ListJobsRequest.Builder request() {
        return request.build().toBuilder();
    }
}
