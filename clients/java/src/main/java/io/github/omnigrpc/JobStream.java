package io.github.omnigrpc;

import io.github.omnigrpc.v1.ArtifactDelivery;
import io.github.omnigrpc.v1.Job;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.WatchJobResponse;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.Spliterator;
import java.util.Spliterators;
import java.util.function.Function;
import java.util.function.Supplier;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * The events of one job, each once and in order, even if the connection is lost in between.
 *
 * <p>The stream of a generation ends as its job does: after {@code failed} or {@code cancelled} it throws the matching
 * {@link OmniException}, and closing it early cancels the job. The stream of a watched job does neither.
 *
 * <p>For one thread, but for {@link #cancel} and {@link #interrupt}, which any may call.
 */
public final class JobStream implements Iterator<JobEvent>, AutoCloseable {
    /** How long leaving a stream waits for the server to accept the cancellation, and again for the job to stop. */
    private static final Duration CANCEL_TIMEOUT = Duration.ofSeconds(5);

    private final Connection connection;
    private final WatchState watch;
    private final Deadline deadline;
    private final boolean owner;
    private final Cancellation cancellation;
    private Supplier<Iterator<JobEvent>> open;
    private Iterator<JobEvent> call;
    private JobEvent next;
    private boolean finished;
    private boolean closed;

    private JobStream(
            Connection connection, WatchState watch, Deadline deadline, boolean owner, Cancellation cancellation) {
        this.connection = connection;
        this.watch = watch;
        this.deadline = deadline;
        this.owner = owner;
        this.cancellation = cancellation;
    }

    /** The stream of a generation. Returns with its first event, or throws the refusal. */
    static JobStream generation(
            Connection connection, Deadline deadline, Cancellation cancellation, Supplier<Iterator<JobEvent>> rpc) {
        WatchState watch =
                new WatchState(
                        connection.reconnect, ArtifactDelivery.ARTIFACT_DELIVERY_INLINE_CHUNKS, "", 0);
        JobStream stream = new JobStream(connection, watch, deadline, true, cancellation);
        stream.open = rpc;
        try {
            stream.hasNext();
        } catch (RuntimeException | Error refused) {
            stream.leave(refused);
            throw refused;
        }
        return stream;
    }

    /** The events of an existing job with a seq greater than {@code afterSeq}. */
    static JobStream watching(Connection connection, String jobId, long afterSeq, Deadline deadline) {
        WatchState watch =
                new WatchState(
                        connection.reconnect, ArtifactDelivery.ARTIFACT_DELIVERY_REFERENCE, jobId, afterSeq);
        JobStream stream = new JobStream(connection, watch, deadline, false, new Cancellation());
        stream.open = stream::openWatch;
        stream.cancellation.abortable();
        return stream;
    }

    /** The job. */
    public String jobId() {
        return watch.jobId();
    }

    /** The seq of the last event that was seen, after which another watcher would go on. */
    public long afterSeq() {
        return watch.afterSeq();
    }

    /** Why the job has no result; empty if it succeeded or has not ended. */
    public Optional<OmniException> error() {
        return watch.error();
    }

    @Override
    public boolean hasNext() {
        if (next == null && !finished) {
            next = advance();
            finished = next == null;
        }
        return next != null;
    }

    @Override
    public JobEvent next() {
        if (!hasNext()) {
            throw new NoSuchElementException();
        }
        JobEvent event = next;
        next = null;
        return event;
    }

    /** The events as a stream, whose closing closes this. */
    public Stream<JobEvent> stream() {
        int properties = Spliterator.ORDERED | Spliterator.NONNULL;
        return StreamSupport.stream(Spliterators.spliteratorUnknownSize(this, properties), false).onClose(this::close);
    }

    /** Asks the server to stop the job, and returns it. The {@code cancelled} event tells when it has stopped. */
    public Job cancel() {
        return connection.cancelJob(jobId(), "", Connection.UNARY_TIMEOUT);
    }

    /** Ends the waiting of the thread that reads this stream, from another thread: it gets CANCELLED. */
    public void interrupt() {
        cancellation.request();
    }

    /** Follows the job to its end, and downloads missing output bytes. Throws the error that ended the job. */
    public GenerationResult result() {
        return result(new JobListener() {});
    }

    /** {@link #result()}, with a listener for the events until then. */
    public GenerationResult result(JobListener listener) {
        while (hasNext()) {
            listener.accept(next());
        }
        error().ifPresent(failed -> {
            throw failed;
        });
        JobEvent last = watch.last().orElseThrow(() -> new IllegalStateException("the stream was closed"));
        List<PartialArtifact> outputs = watch.outputs().stream().map(this::whole).collect(Collectors.toList());
        List<Output> checked = outputs.stream().map(Output::new).collect(Collectors.toList());
        return new GenerationResult(jobId(), last.getCompleted(), checked);
    }

    /** Closes the stream. The job of a generation that has not ended is cancelled. */
    @Override
    public void close() {
        if (closed) {
            return;
        }
        closed = true;
        finished = true;
        next = null;
        cancellation.endCall();
        if (owner && !watch.ended() && !jobId().isEmpty()) {
            Connection.apart(this::cancelAndWait);
        }
    }

    /** Closes the stream because of an error, to which a failure to do so is added. */
    void leave(Throwable error) {
        try {
            close();
        } catch (OmniException failed) {
            error.addSuppressed(failed);
        }
    }

    private PartialArtifact whole(PartialArtifact output) {
        String id = output.artifact().getArtifactId();
        return output.complete() ? output : connection.download(id, deadline, output, cancellation);
    }

    private Void cancelAndWait() {
        connection.cancelJob(jobId(), "the client left the stream", CANCEL_TIMEOUT);
        JobStream rest = watching(connection, jobId(), afterSeq(), Deadline.after(CANCEL_TIMEOUT));
        try (rest) {
            while (rest.hasNext()) {
                rest.next();
            }
        } catch (OmniException failed) {
            // running out of time is no error: the server has accepted the cancellation
            if (failed.code() != Status.Code.DEADLINE_EXCEEDED) {
                throw failed;
            }
        }
        return null;
    }

    private Iterator<JobEvent> openWatch() {
        return mapped(connection.jobs(deadline).watchJob(watch.request()), WatchJobResponse::getEvent);
    }

    /** The next event that the caller has not seen, or null after the job's last. */
    private JobEvent advance() {
        StartRetry start = connection.startRetry(deadline);
        while (true) {
            CallFailure ended = CallFailure.ENDED_EARLY;
            try {
                if (call == null) {
                    call = cancellation.call(open);
                }
                while (call.hasNext()) {
                    JobEvent event = call.next();
                    boolean told = watch.accept(event);
                    open = this::openWatch;
                    cancellation.abortable();
                    if (told) {
                        return event;
                    }
                }
            } catch (StatusRuntimeException error) {
                ended = CallFailure.of(error, connection.address);
            }
            call = null;
            if (watch.ended()) {
                cancellation.endCall();
                error().filter(failed -> owner).ifPresent(failed -> {
                    finished = true;
                    throw failed;
                });
                return null;
            }
            waitAfter(ended, start);
        }
    }

    /** Waits until the events are to be asked for again. Throws if they are not. */
    private void waitAfter(CallFailure ended, StartRetry start) {
        try {
            cancellation.check();
            if (watch.rewinds(ended)) {
                return;
            }
            Duration delay = watch.connected() ? watch.lost(ended) : start.delay(ended);
            cancellation.sleep(deadline.within(delay));
        } catch (OmniException stopped) {
            finished = true;
            throw stopped.jobId().isEmpty() ? stopped.toBuilder().job(jobId()).build() : stopped;
        }
        connection.connectAgain();
    }

    /** Events of any of the streams that carry them. */
    static <T> Iterator<JobEvent> mapped(Iterator<T> messages, Function<T, JobEvent> event) {
        return new Iterator<>() {
            @Override
            public boolean hasNext() {
                return messages.hasNext();
            }

            @Override
            public JobEvent next() {
                return event.apply(messages.next());
            }
        };
    }
}
