# Stubs of the API, made from its .proto files where they are built. AdminService is not part of this client.
set(GENERATED_DIR ${CMAKE_CURRENT_BINARY_DIR}/generated)
set(messages google/rpc/status google/rpc/error_details)
foreach(name artifact event generation job media model options sampling)
  list(APPEND messages omni_grpc/v1/${name})
endforeach()
set(services omni_grpc/v1/artifact omni_grpc/v1/generation omni_grpc/v1/job omni_grpc/v1/model)

set(protos)
set(service_protos)
set(generated_sources)
set(generated_headers)
foreach(name ${messages})
  list(APPEND protos ${OMNI_GRPC_PROTO_DIR}/${name}.proto)
  list(APPEND generated_sources ${GENERATED_DIR}/${name}.pb.cc)
  list(APPEND generated_headers ${GENERATED_DIR}/${name}.pb.h)
endforeach()
foreach(name ${services})
  list(APPEND service_protos ${OMNI_GRPC_PROTO_DIR}/${name}.proto)
  list(APPEND generated_sources ${GENERATED_DIR}/${name}.grpc.pb.cc)
  list(APPEND generated_headers ${GENERATED_DIR}/${name}.grpc.pb.h)
endforeach()

file(MAKE_DIRECTORY ${GENERATED_DIR})
add_custom_command(
  OUTPUT ${generated_sources} ${generated_headers}
  COMMAND protobuf::protoc -I ${OMNI_GRPC_PROTO_DIR} --cpp_out=${GENERATED_DIR} ${protos}
  COMMAND protobuf::protoc -I ${OMNI_GRPC_PROTO_DIR} --grpc_out=${GENERATED_DIR}
          --plugin=protoc-gen-grpc=${GRPC_CPP_PLUGIN} ${service_protos}
  DEPENDS ${protos}
  COMMENT "Generating the stubs of omni_grpc.v1"
  VERBATIM)

add_library(omni_grpc_stubs OBJECT ${generated_sources})
target_compile_features(omni_grpc_stubs PUBLIC cxx_std_17)
if(BUILD_SHARED_LIBS)
  set_target_properties(omni_grpc_stubs PROPERTIES POSITION_INDEPENDENT_CODE ON)
endif()
# twice as fast to compile, and no slower where files and networks are what is waited for
target_compile_options(omni_grpc_stubs PRIVATE -O1 -w)
target_include_directories(omni_grpc_stubs PUBLIC ${GENERATED_DIR})
target_link_libraries(omni_grpc_stubs PUBLIC protobuf::libprotobuf gRPC::grpc++)
target_precompile_headers(omni_grpc_stubs PRIVATE <google/protobuf/message.h> <grpcpp/grpcpp.h>)
