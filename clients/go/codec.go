package omnigrpc

import (
	"fmt"

	"google.golang.org/protobuf/proto"
)

// codec encodes messages with google.golang.org/protobuf. gRPC's own does it with whatever github.com/golang/protobuf
// it was built with, and versions before 1.4 cannot encode a oneof of today's generated code.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(value interface{}) ([]byte, error) {
	message, ok := value.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is not a protobuf message", value)
	}
	return proto.Marshal(message)
}

func (codec) Unmarshal(data []byte, value interface{}) error {
	message, ok := value.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is not a protobuf message", value)
	}
	return proto.Unmarshal(data, message)
}
