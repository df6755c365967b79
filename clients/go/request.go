package omnigrpc

import (
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// Request is what is to be made: see Image, Edit, Video, Audio and FromProto.
type Request struct {
	message proto.Message
	wrong   []Violation
}

// Option sets a field of a request. What is not set stays unset, and the server takes the model's default.
type Option func(*Request)

// Image asks for an image.
func Image(prompt string, options ...Option) *Request {
	return newRequest(&v1.GenerateImageRequest{Prompt: prompt}, options)
}

// Edit asks for an image that is made from others.
func Edit(prompt string, images []*v1.MediaInput, options ...Option) *Request {
	return newRequest(&v1.EditImageRequest{Prompt: prompt, Images: images}, options)
}

// Video asks for a video.
func Video(prompt string, options ...Option) *Request {
	return newRequest(&v1.GenerateVideoRequest{Prompt: prompt}, options)
}

// Audio asks for sound.
func Audio(prompt string, options ...Option) *Request {
	return newRequest(&v1.GenerateAudioRequest{Prompt: prompt}, options)
}

// FromProto takes a GenerateImageRequest, EditImageRequest, GenerateVideoRequest or GenerateAudioRequest as it is. The
// message is copied.
func FromProto(message proto.Message, options ...Option) *Request {
	return newRequest(proto.Clone(message), options)
}

func newRequest(message proto.Message, options []Option) *Request {
	made := &Request{message: message}
	made.apply(options)
	return made
}

func (r *Request) apply(options []Option) {
	for _, option := range options {
		option(r)
	}
}

// Set sets any field by its path, for example Set("sampling.guidance.scale", 3.5). Enums are given by name, without
// their prefix and in any case; durations as time.Duration. A field that the request does not have, a value of another
// type and a name that there is not are refused before anything is sent.
func Set(path string, value interface{}) Option {
	return func(r *Request) {
		if rule := set(r.message.ProtoReflect(), strings.Split(path, "."), value); rule != "" {
			r.wrong = append(r.wrong, Violation{Field: path, Description: rule})
		}
	}
}

// set returns the rule that the value breaks.
func set(message protoreflect.Message, path []string, value interface{}) string {
	field := message.Descriptor().Fields().ByName(protoreflect.Name(path[0]))
	if field == nil {
		return fmt.Sprintf("%s has no field %s", message.Descriptor().Name(), path[0])
	}
	single := field.Message() != nil && !field.IsList() && !field.IsMap()
	if len(path) > 1 {
		if !single {
			return path[0] + " has no fields"
		}
		return set(message.Mutable(field).Message(), path[1:], value)
	}
	switch given := value.(type) {
	case string:
		if field.Enum() != nil {
			return setName(message, field, given)
		}
	case time.Duration:
		if single && field.Message().FullName() == "google.protobuf.Duration" {
			value = durationpb.New(given)
		}
	}
	return assign(message, field, value)
}

// setName sets an enum by a name: "png" is IMAGE_FORMAT_PNG.
func setName(message protoreflect.Message, field protoreflect.FieldDescriptor, name string) string {
	values := field.Enum().Values()
	prefix := strings.TrimSuffix(string(values.ByNumber(0).Name()), "UNSPECIFIED")
	upper := strings.ToUpper(name)
	known := make([]string, 0, values.Len())
	for i := 1; i < values.Len(); i++ {
		short := strings.TrimPrefix(string(values.Get(i).Name()), prefix)
		if upper == short || upper == prefix+short {
			message.Set(field, protoreflect.ValueOfEnum(values.Get(i).Number()))
			return ""
		}
		known = append(known, strings.ToLower(short))
	}
	return fmt.Sprintf("%q is not one of %s", name, strings.Join(known, ", "))
}

// assign sets a field to a value that has its type in the generated code. Reflection panics for any other.
func assign(message protoreflect.Message, field protoreflect.FieldDescriptor, value interface{}) (rule string) {
	defer func() {
		if recover() != nil {
			rule = fmt.Sprintf("a %T cannot be %s", value, field.Kind())
		}
	}()
	switch given := value.(type) {
	case []uint64:
		list := message.Mutable(field).List()
		for _, one := range given {
			list.Append(protoreflect.ValueOfUint64(one))
		}
	case map[string]string:
		entries := message.Mutable(field).Map()
		for key, text := range given {
			entries.Set(protoreflect.ValueOfString(key).MapKey(), protoreflect.ValueOfString(text))
		}
	case proto.Message:
		message.Set(field, protoreflect.ValueOfMessage(given.ProtoReflect()))
	default:
		message.Set(field, protoreflect.ValueOf(value))
	}
	return ""
}

// generation is any of the four requests.
type generation interface{ GetOptions() *v1.JobOptions }

// ready gives the message as it is sent, with a request_id, or says what is wrong with it.
func (r *Request) ready() (proto.Message, error) {
	if len(r.wrong) > 0 {
		first := r.wrong[0]
		found := refused(first.Field, first.Description)
		found.Violations = r.wrong
		return nil, found
	}
	message := proto.Clone(r.message)
	asked, ok := message.(generation)
	if !ok {
		return nil, refused("request", fmt.Sprintf("%T is not a generation", message))
	}
	if asked.GetOptions().GetRequestId() != "" {
		return message, nil
	}
	id, err := newID()
	if err != nil {
		return nil, err
	}
	set(message.ProtoReflect(), []string{"options", "request_id"}, id)
	return message, nil
}

// newID is a UUID4.
func newID() (string, error) {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return "", fmt.Errorf("no random numbers for a request_id: %w", err)
	}
	id[6] = id[6]&0x0f | 0x40
	id[8] = id[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:]), nil
}
