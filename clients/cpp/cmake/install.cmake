# find_package(omni_grpc_client), target omni_grpc::client
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/omni_grpc_client)
install(TARGETS omni_grpc_client EXPORT omni_grpc_client
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/ DESTINATION ${include_dir})
install(DIRECTORY ${GENERATED_DIR}/ DESTINATION ${include_dir} FILES_MATCHING PATTERN "*.pb.h")
install(EXPORT omni_grpc_client NAMESPACE omni_grpc:: FILE omni_grpc_client-targets.cmake DESTINATION ${package_dir})
write_basic_package_version_file(omni_grpc_client-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/omni_grpc_client-config-version.cmake
              cmake/omni_grpc_client-config.cmake
        DESTINATION ${package_dir})
