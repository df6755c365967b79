package io.github.omnigrpc;

import com.google.protobuf.Message;
import io.github.omnigrpc.v1.CreateJobRequest;
import io.github.omnigrpc.v1.EditImageRequest;
import io.github.omnigrpc.v1.EditImageResponse;
import io.github.omnigrpc.v1.GenerateAudioRequest;
import io.github.omnigrpc.v1.GenerateAudioResponse;
import io.github.omnigrpc.v1.GenerateImageRequest;
import io.github.omnigrpc.v1.GenerateImageResponse;
import io.github.omnigrpc.v1.GenerateVideoRequest;
import io.github.omnigrpc.v1.GenerateVideoResponse;
import io.github.omnigrpc.v1.GetJobRequest;
import io.github.omnigrpc.v1.GetServerInfoRequest;
import io.github.omnigrpc.v1.GetServerInfoResponse;
import io.github.omnigrpc.v1.Job;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.ListJobsRequest;
import io.github.omnigrpc.v1.ListJobsResponse;
import io.github.omnigrpc.v1.ListModelsRequest;
import io.github.omnigrpc.v1.Model;
import io.github.omnigrpc.v1.UploadAssetResponse;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/**
 * A client of one server. May be used by several threads. Every method throws the {@link OmniException} that the server
 * sent, or UNAVAILABLE (SERVER_UNREACHABLE) if it cannot be reached.
 *
 * <pre>{@code
 * try (OmniClient client = OmniClient.connect("localhost:50051")) {
 *     GenerationResult result = client.generate(ImageRequest.of("a red circle").seed(7).build());
 *     result.outputs().get(0).save(Path.of("out.png"));
 * }
 * }</pre>
 */
public final class OmniClient implements AutoCloseable {
    /** How long closing waits for the cancellation of jobs to reach the server. */
    private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(12);

    private static final int MAX_PAGE = 1000;

    private final Connection connection;
    private final Set<GenerationFuture> running = ConcurrentHashMap.newKeySet();
    private final ExecutorService executor =
            Executors.newCachedThreadPool(work -> {
                Thread thread = new Thread(work, "omni-grpc-client");
                thread.setDaemon(true);
                return thread;
            });

    OmniClient(Connection connection) {
        this.connection = connection;
    }

    /** Settings of a client for an address: HOST:PORT, [IPV6]:PORT or a target of gRPC. */
    public static ClientBuilder builder(String address) {
        return new ClientBuilder(address);
    }

    /** A client without TLS and token. */
    public static OmniClient connect(String address) {
        return builder(address).build();
    }

    // --- generation ---

    /** Makes something and waits for it. Interrupting the thread, a timeout and any exception cancel the job. */
    public GenerationResult generate(GenerationRequest request) {
        return generate(request, new JobListener() {});
    }

    /** {@link #generate(GenerationRequest)}, with a listener for the job's progress. */
    public GenerationResult generate(GenerationRequest request, JobListener listener) {
        return generate(request, listener, new Cancellation());
    }

    /** Makes something in a thread of this client. {@code cancel(true)} on the future cancels the job. */
    public CompletableFuture<GenerationResult> generateAsync(GenerationRequest request) {
        return generateAsync(request, new JobListener() {});
    }

    /** {@link #generateAsync(GenerationRequest)}, with a listener, which is called in that thread. */
    public CompletableFuture<GenerationResult> generateAsync(GenerationRequest request, JobListener listener) {
        GenerationFuture future = new GenerationFuture();
        running.add(future);
        future.whenComplete((result, error) -> running.remove(future));
        future.start(executor, cancellation -> generate(request, listener, cancellation));
        return future;
    }

    /** Makes something, and gives its events as they happen. Returns with the first, or throws the refusal. */
    public JobStream stream(GenerationRequest request) {
        return stream(request, Deadline.after(request.timeout()), new Cancellation());
    }

    // --- jobs ---

    /** Queues a job that outlives this client. {@code watchJob(job.getJobId()).result()} waits for its outputs. */
    public Job createJob(GenerationRequest request) {
        Deadline deadline = Deadline.after(request.timeout());
        Message task = connection.withUploads(request.identified(), deadline);
        CreateJobRequest.Builder job = CreateJobRequest.newBuilder();
        if (task instanceof GenerateImageRequest) {
            job.setGenerateImage((GenerateImageRequest) task);
        } else if (task instanceof EditImageRequest) {
            job.setEditImage((EditImageRequest) task);
        } else if (task instanceof GenerateVideoRequest) {
            job.setGenerateVideo((GenerateVideoRequest) task);
        } else {
            job.setGenerateAudio((GenerateAudioRequest) task);
        }
        return connection.unary(deadline, limit -> connection.jobs(limit).createJob(job.build())).getJob();
    }

    /** A job as it stands. */
    public Job getJob(String jobId) {
        GetJobRequest request = GetJobRequest.newBuilder().setJobId(jobId).build();
        return connection.unary(none(), limit -> connection.jobs(limit).getJob(request)).getJob();
    }

    /** The newest jobs. */
    public List<Job> listJobs() {
        return listJobs(new JobFilter());
    }

    /** The newest jobs that fit. */
    public List<Job> listJobs(JobFilter filter) {
        ListJobsRequest.Builder request = filter.request();
        List<Job> found = new ArrayList<>();
        do {
            request.setPageSize(Math.min(MAX_PAGE, filter.limit() - found.size()));
            ListJobsRequest page = request.build();
            ListJobsResponse reply = connection.unary(none(), limit -> connection.jobs(limit).listJobs(page));
            found.addAll(reply.getJobsList());
            request.setPageToken(reply.getNextPageToken());
        } while (found.size() < filter.limit() && !request.getPageToken().isEmpty());
        return found;
    }

    /** The events of a job, those so far and those to come, to its end. */
    public JobStream watchJob(String jobId) {
        return watchJob(jobId, 0);
    }

    /** The events of a job with a seq greater than {@code afterSeq}. */
    public JobStream watchJob(String jobId, long afterSeq) {
        return JobStream.watching(connection, jobId, afterSeq, none());
    }

    /** {@link #watchJob(String, long)}, for at most {@code timeout}; the job goes on. */
    public JobStream watchJob(String jobId, long afterSeq, Duration timeout) {
        return JobStream.watching(connection, jobId, afterSeq, Deadline.after(timeout));
    }

    /** Asks a job to stop, and returns it. A job that has ended is returned unchanged. */
    public Job cancelJob(String jobId) {
        return cancelJob(jobId, "");
    }

    /** {@link #cancelJob(String)}, with a reason for its {@code cancelled} event. */
    public Job cancelJob(String jobId, String reason) {
        return connection.cancelJob(jobId, reason, Connection.UNARY_TIMEOUT);
    }

    // --- artifacts ---

    /** An output of a job, checked against its SHA-256. Goes on where it broke off if the connection is lost. */
    public Output download(String artifactId) {
        return download(artifactId, null);
    }

    /** {@link #download(String)} within a time, or without limit for null. */
    public Output download(String artifactId, Duration timeout) {
        Cancellation cancellation = new Cancellation();
        return new Output(connection.download(artifactId, Deadline.after(timeout), null, cancellation));
    }

    /** Stores a file on the server, for use in several requests. Its type is told by its name. */
    public UploadAssetResponse upload(Path file) {
        return connection.upload(UploadSource.of(file), none());
    }

    /** Stores bytes on the server. */
    public UploadAssetResponse upload(byte[] data, String mimeType) {
        return connection.upload(UploadSource.of(data, mimeType), none());
    }

    // --- the server ---

    /** The models of the server, with their limits and defaults. */
    public List<Model> listModels() {
        ListModelsRequest request = ListModelsRequest.getDefaultInstance();
        return connection.unary(none(), limit -> connection.models(limit).listModels(request)).getModelsList();
    }

    /** Version, devices and limits of the server. */
    public GetServerInfoResponse serverInfo() {
        GetServerInfoRequest request = GetServerInfoRequest.getDefaultInstance();
        return connection.unary(none(), limit -> connection.admin(limit).getServerInfo(request));
    }

    /** Cancels what {@code generateAsync} still runs, and closes the connection. */
    @Override
    public void close() {
        running.forEach(future -> future.cancel(true));
        executor.shutdown();
        try {
            executor.awaitTermination(CLOSE_TIMEOUT.toMillis(), TimeUnit.MILLISECONDS);
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        } finally {
            connection.close();
        }
    }

    // --- internal ---

    private GenerationResult generate(GenerationRequest request, JobListener listener, Cancellation cancellation) {
        try (JobStream stream = stream(request, Deadline.after(request.timeout()), cancellation)) {
            return stream.result(listener);
        }
    }

    private JobStream stream(GenerationRequest request, Deadline deadline, Cancellation cancellation) {
        Message task = connection.withUploads(request.identified(), deadline);
        return JobStream.generation(connection, deadline, cancellation, () -> open(task, deadline));
    }

    private Iterator<JobEvent> open(Message task, Deadline deadline) {
        var stub = connection.generation(deadline);
        if (task instanceof GenerateImageRequest) {
            return JobStream.mapped(
                    stub.generateImage((GenerateImageRequest) task), GenerateImageResponse::getEvent);
        }
        if (task instanceof EditImageRequest) {
            return JobStream.mapped(stub.editImage((EditImageRequest) task), EditImageResponse::getEvent);
        }
        if (task instanceof GenerateVideoRequest) {
            return JobStream.mapped(
                    stub.generateVideo((GenerateVideoRequest) task), GenerateVideoResponse::getEvent);
        }
        return JobStream.mapped(stub.generateAudio((GenerateAudioRequest) task), GenerateAudioResponse::getEvent);
    }

    private static Deadline none() {
        return Deadline.after(null);
    }
}
