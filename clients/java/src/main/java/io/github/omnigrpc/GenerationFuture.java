package io.github.omnigrpc;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.Executor;
import java.util.function.Function;

/** The result to come of a generation. Cancelling it cancels the job; cancelling what is derived from it does not. */
final class GenerationFuture extends CompletableFuture<GenerationResult> {
    private final Cancellation cancellation = new Cancellation();

    /** Runs the generation. */
    void start(Executor executor, Function<Cancellation, GenerationResult> work) {
        executor.execute(() -> {
            try {
                cancellation.check();
                complete(work.apply(cancellation));
            } catch (CompletionException wrapped) {
                completeExceptionally(wrapped.getCause());
            } catch (Throwable failed) { // whoever waits for the future is told, errors included
                completeExceptionally(failed);
            }
        });
    }

    @Override
    public boolean cancel(boolean mayInterruptIfRunning) {
        boolean done = super.cancel(mayInterruptIfRunning);
        if (isCancelled()) {
            cancellation.request();
        }
        return done;
    }
}
