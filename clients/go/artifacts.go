package omnigrpc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

const uploadChunk = 256 << 10

// Upload stores media on the server, to be used by Asset. What cannot be read twice, from a pipe for example, is held in
// memory: its size and SHA-256 are sent before it.
func (c *Client) Upload(ctx context.Context, reader io.Reader, mimeType string) (*v1.UploadAssetResponse, error) {
	if mimeType == "" {
		mimeType = "application/octet-stream"
	}
	media, start, err := rereadable(reader)
	if err != nil {
		return nil, refused("media", err.Error())
	}
	hash := sha256.New()
	size, err := io.Copy(hash, media)
	if err != nil {
		return nil, refused("media", err.Error())
	}
	header := &v1.UploadHeader{MimeType: mimeType, SizeBytes: uint64(size), Sha256: hash.Sum(nil)}
	var stored *v1.UploadAssetResponse
	err = c.unary(ctx, func(ctx context.Context) (err error) {
		stored, err = c.send(ctx, header, media, start)
		return err
	})
	return stored, err
}

// rereadable gives a reader that can go back to where it starts.
func rereadable(reader io.Reader) (io.ReadSeeker, int64, error) {
	if media, ok := reader.(io.ReadSeeker); ok {
		// the standard input is one that cannot seek where it is a pipe
		if start, err := media.Seek(0, io.SeekCurrent); err == nil {
			return media, start, nil
		}
	}
	data, err := io.ReadAll(reader)
	return bytes.NewReader(data), 0, err
}

func (c *Client) send(
	ctx context.Context, header *v1.UploadHeader, media io.ReadSeeker, start int64,
) (*v1.UploadAssetResponse, error) {
	if _, err := media.Seek(start, io.SeekStart); err != nil {
		return nil, refused("media", err.Error())
	}
	// without it a call that is given up here would stay open
	ctx, hangUp := context.WithCancel(ctx)
	defer hangUp()
	call, err := c.artifacts.UploadAsset(ctx)
	if err != nil {
		return nil, err
	}
	err = call.Send(&v1.UploadAssetRequest{Payload: &v1.UploadAssetRequest_Header{Header: header}})
	chunk := make([]byte, uploadChunk)
	for err == nil {
		count, readErr := io.ReadFull(media, chunk)
		if count > 0 {
			err = call.Send(&v1.UploadAssetRequest{Payload: &v1.UploadAssetRequest_Data{Data: chunk[:count]}})
		}
		if readErr == io.EOF || readErr == io.ErrUnexpectedEOF {
			break
		}
		if readErr != nil {
			return nil, refused("media", readErr.Error())
		}
	}
	// io.EOF from Send means that the server has ended the call, and CloseAndRecv tells why
	if err != nil && err != io.EOF {
		return nil, err
	}
	return call.CloseAndRecv()
}

// Download gives the bytes of an output, checked against its SHA-256. It goes on where it broke off after each loss of
// the connection.
func (c *Client) Download(ctx context.Context, artifactID string) ([]byte, error) {
	return c.bytesOf(ctx, artifactID, nil)
}

// bytesOf fetches what is missing in begun, which may be nil.
func (c *Client) bytesOf(ctx context.Context, artifactID string, begun *partial) ([]byte, error) {
	if begun != nil && begun.complete() {
		return begun.checked()
	}
	state := &downloadState{reconnect: c.reconnect, artifactID: artifactID, partial: begun}
	tried := c.newCalls()
	for {
		err := c.receive(ctx, state)
		if err == nil {
			return state.finished()
		}
		if !state.connected {
			if err = tried.again(ctx, err); err != nil {
				return nil, err
			}
			continue
		}
		delay, err := state.lost(fromCall(err, c.address))
		if err != nil {
			return nil, err
		}
		if err = sleep(ctx, delay); err != nil {
			return nil, fromCall(err, c.address)
		}
	}
}

func (c *Client) receive(ctx context.Context, state *downloadState) error {
	ctx, hangUp := context.WithCancel(ctx)
	defer hangUp()
	call, err := c.artifacts.DownloadArtifact(ctx, state.request())
	for err == nil {
		var message *v1.DownloadArtifactResponse
		if message, err = call.Recv(); err == nil {
			err = state.accept(message)
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}
