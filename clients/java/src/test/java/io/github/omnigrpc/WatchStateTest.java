package io.github.omnigrpc;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.ByteString;
import io.github.omnigrpc.v1.Artifact;
import io.github.omnigrpc.v1.ArtifactChunk;
import io.github.omnigrpc.v1.ArtifactDelivery;
import io.github.omnigrpc.v1.ArtifactReady;
import io.github.omnigrpc.v1.Cancelled;
import io.github.omnigrpc.v1.Completed;
import io.github.omnigrpc.v1.DownloadArtifactResponse;
import io.github.omnigrpc.v1.Failed;
import io.github.omnigrpc.v1.Heartbeat;
import io.github.omnigrpc.v1.JobEvent;
import io.github.omnigrpc.v1.StepProgress;
import io.grpc.Status;
import java.time.Duration;
import org.junit.jupiter.api.Test;

class WatchStateTest {
    private static final byte[] DATA = {1, 2, 3, 4};
    private static final Artifact ARTIFACT =
            Artifact.newBuilder()
                    .setArtifactId("a")
                    .setSizeBytes(DATA.length)
                    .setSha256(ByteString.copyFrom(Digests.sha256().digest(DATA)))
                    .build();

    private final WatchState watch =
            new WatchState(Reconnect.defaults(), ArtifactDelivery.ARTIFACT_DELIVERY_INLINE_CHUNKS, "", 0);

    private static JobEvent.Builder event(long seq) {
        return JobEvent.newBuilder().setJobId("j").setSeq(seq);
    }

    private static JobEvent step(long seq) {
        return event(seq).setStepProgress(StepProgress.getDefaultInstance()).build();
    }

    private static ArtifactChunk chunk(int offset, int end) {
        ByteString data = ByteString.copyFrom(DATA, offset, end - offset);
        return ArtifactChunk.newBuilder().setArtifactId("a").setOffset(offset).setData(data).build();
    }

    private static CallFailure gone() {
        return ErrorsTest.failure(Status.UNAVAILABLE);
    }

    @Test
    void eventsComeOnce() {
        assertTrue(watch.accept(step(1)));
        assertTrue(watch.accept(step(3)));
        assertFalse(watch.accept(step(3)));
        assertFalse(watch.accept(event(0).setHeartbeat(Heartbeat.getDefaultInstance()).build()));
        assertEquals(3, watch.request().getAfterSeq());
        assertEquals("j", watch.request().getJobId());
    }

    @Test
    void unknownKindsArePassedOverAndTheirSeqNoted() {
        assertFalse(watch.accept(event(4).build()));
        assertEquals(4, watch.afterSeq());
    }

    @Test
    void bytesThatCameBeforeTheCutAreKept() {
        watch.accept(event(1).setArtifactReady(ArtifactReady.newBuilder().setArtifact(ARTIFACT)).build());
        assertFalse(watch.accept(event(0).setArtifactChunk(chunk(0, 3)).build()));
        watch.accept(event(2).setCompleted(Completed.newBuilder().addArtifacts(ARTIFACT)).build());
        PartialArtifact output = watch.outputs().get(0);
        assertEquals(3, output.offset());
        StartRetry retry = new StartRetry(0, Deadline.after(null));
        DownloadState download = new DownloadState(Reconnect.defaults(), retry, "a", output);
        assertEquals(3, download.request().getOffset());
        download.accept(DownloadArtifactResponse.newBuilder().setMetadata(ARTIFACT).build());
        download.accept(DownloadArtifactResponse.newBuilder().setChunk(chunk(3, 4)).build());
        assertArrayEquals(DATA, new Output(download.finished()).data());
    }

    @Test
    void chunksOfNothingAreRefused() {
        JobEvent event = event(0).setArtifactChunk(chunk(0, 1)).build();
        assertEquals("PROTOCOL_ERROR", assertThrows(OmniException.class, () -> watch.accept(event)).reason());
    }

    @Test
    void eightAttemptsAndAnyMessageResetsThem() {
        watch.accept(step(1));
        for (int i = 0; i < 7; i++) {
            watch.lost(gone());
        }
        watch.accept(step(2));
        for (int i = 0; i < 8; i++) {
            watch.lost(gone());
        }
        OmniException error = assertThrows(OmniException.class, () -> watch.lost(gone()));
        assertEquals("STREAM_LOST", error.reason());
        assertEquals("2", error.metadata().get("after_seq"));
        assertEquals("j", error.jobId());
    }

    @Test
    void whatTheServerRefusesIsNotTriedAgain() {
        watch.accept(step(1));
        CallFailure denied = ErrorsTest.failure(Status.PERMISSION_DENIED);
        assertThrows(OmniException.class, () -> watch.lost(denied));
        CallFailure unknown = ErrorsTest.failure(Status.NOT_FOUND);
        assertEquals("JOB_LOST", assertThrows(OmniException.class, () -> watch.lost(unknown)).reason());
        CallFailure late = ErrorsTest.failure(Status.DEADLINE_EXCEEDED);
        assertEquals("j", assertThrows(OmniException.class, () -> watch.lost(late)).jobId());
    }

    @Test
    void anEndedJobWithoutNewEventsIsAskedForItsLast() {
        WatchState later =
                new WatchState(Reconnect.defaults(), ArtifactDelivery.ARTIFACT_DELIVERY_REFERENCE, "j", 9);
        assertTrue(later.rewinds(CallFailure.ENDED_EARLY));
        assertEquals(8, later.request().getAfterSeq());
        assertFalse(later.rewinds(CallFailure.ENDED_EARLY));
    }

    @Test
    void endsHaveErrors() {
        com.google.rpc.Status status = com.google.rpc.Status.newBuilder().setCode(4).setMessage("late").build();
        watch.accept(event(1).setFailed(Failed.newBuilder().setStatus(status)).build());
        assertEquals(Status.Code.DEADLINE_EXCEEDED, watch.error().orElseThrow().code());
        assertEquals("j", watch.error().orElseThrow().jobId());
        watch.accept(event(2).setCancelled(Cancelled.newBuilder().setReason("why")).build());
        assertEquals("JOB_CANCELLED", watch.error().orElseThrow().reason());
    }

    @Test
    void wrongBytesAreCorrupt() {
        PartialArtifact wrong = new PartialArtifact(ARTIFACT);
        assertThrows(OmniException.class, () -> wrong.add(chunk(1, 2)));
        byte[] other = {1, 2, 3, 5};
        wrong.add(ArtifactChunk.newBuilder().setData(ByteString.copyFrom(other)).build());
        assertEquals("ARTIFACT_CORRUPT", assertThrows(OmniException.class, wrong::data).reason());
        assertThrows(OmniException.class, () -> wrong.add(chunk(3, 4)));
    }

    @Test
    void downloadsGoOnWhereTheyBrokeOff() {
        StartRetry retry = new StartRetry(0, Deadline.after(Duration.ofMinutes(1)));
        DownloadState download = new DownloadState(Reconnect.defaults(), retry, "a", null);
        assertThrows(OmniException.class, download::finished);
        download.accept(DownloadArtifactResponse.newBuilder().setMetadata(ARTIFACT).build());
        download.accept(DownloadArtifactResponse.newBuilder().setChunk(chunk(0, 2)).build());
        download.lost(gone());
        assertEquals(2, download.request().getOffset());
        Artifact other = ARTIFACT.toBuilder().setSha256(ByteString.EMPTY).build();
        DownloadArtifactResponse changed = DownloadArtifactResponse.newBuilder().setMetadata(other).build();
        assertThrows(OmniException.class, () -> download.accept(changed));
        assertThrows(OmniException.class, () -> download.lost(ErrorsTest.failure(Status.NOT_FOUND)));
    }
}
