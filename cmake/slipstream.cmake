# How every target of ours is built: one set of flags, one shape of test.

# AVX2 + FMA is the oldest CPU we run on; AVX-512 forms are chosen at run time (kernels/simd). AES and PCLMUL,
# which every such CPU has, are part of what Highway calls AVX2: without them its baseline would be SSSE3, and
# every SIMD file would be compiled twice more, for CPUs whose multiply-add is not fused.
# -ffp-contract=off: a fused multiply-add happens where the source says so and nowhere else, so that
# two builds of one formula, and its reference, round alike.
add_library(slipstream_flags INTERFACE)
target_include_directories(slipstream_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(slipstream_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -march=x86-64-v3 -maes -mpclmul
    -ffp-contract=off>)
# GCC's warnings are errors. Clang, which builds the fuzzers only, has others of its own.
target_compile_options(slipstream_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Werror>)
# The same on the device: no contraction but by name.
target_compile_options(slipstream_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --extended-lambda>)
if(SLIPSTREAM_SANITIZE)
  target_compile_options(slipstream_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SLIPSTREAM_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
  target_link_options(slipstream_flags INTERFACE -fsanitize=${SLIPSTREAM_SANITIZE})
endif()
if(SLIPSTREAM_FUZZ)
  target_compile_options(slipstream_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()

# slipstream_library(<folder> SOURCES ... DEPENDS ...): the one target of a folder.
function(slipstream_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(slipstream_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(slipstream_${name} PUBLIC slipstream_flags ${ARG_DEPENDS})
endfunction()

# slipstream_test(<file without .cc> LABEL unit|golden|... DEPENDS ...): one binary, one ctest entry.
function(slipstream_test file)
  cmake_parse_arguments(ARG "" "LABEL" "DEPENDS" ${ARGN})
  if(NOT BUILD_TESTING)
    return()
  endif()
  get_filename_component(name ${file} NAME)
  add_executable(${name} ${file}.cc)
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} GTest::gtest GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
  set_tests_properties(${name} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT 900)
endfunction()

# Over real ranks: slipstream_mpi_test(<file without .cc> RANKS n DEPENDS ...). Each test has its own session directory, and
# plain copies between ranks, as containers forbid others.
function(slipstream_mpi_test file)
  cmake_parse_arguments(ARG "" "RANKS" "DEPENDS" ${ARGN})
  if(NOT BUILD_TESTING)
    return()
  endif()
  get_filename_component(name ${file} NAME)
  if(NOT TARGET ${name})
    add_executable(${name} ${file}.cc)
    target_link_libraries(${name} PRIVATE ${ARG_DEPENDS})
  endif()
  add_test(NAME ${name}_${ARG_RANKS}
    COMMAND ${MPIEXEC_EXECUTABLE} -np ${ARG_RANKS} --oversubscribe --allow-run-as-root
      --mca orte_tmpdir_base ${CMAKE_CURRENT_BINARY_DIR} $<TARGET_FILE:${name}>)
  set_tests_properties(${name}_${ARG_RANKS} PROPERTIES LABELS process TIMEOUT 300
    ENVIRONMENT "OMPI_MCA_btl_vader_single_copy_mechanism=none;OMPI_MCA_mpi_yield_when_idle=1")
endfunction()

# slipstream_benchmark(<file without .cc> DEPENDS ...): a Google Benchmark binary; never a ctest entry.
function(slipstream_benchmark file)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  if(NOT SLIPSTREAM_BENCH)
    return()
  endif()
  find_package(benchmark REQUIRED)
  get_filename_component(name ${file} NAME)
  add_executable(${name} ${file}.cc)
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS} benchmark::benchmark benchmark::benchmark_main)
endfunction()

# slipstream_fuzzer(<file without .cc> DEPENDS ...): a libFuzzer binary; never a ctest entry.
function(slipstream_fuzzer file)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  get_filename_component(name ${file} NAME)
  add_executable(${name} ${file}.cc)
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endfunction()

# slipstream_operator(<op>): kernels/<op>/<op>{.h,_ref.cc,_simd.cc,.cu,_test.cc,_cuda_test.cc,_bench.cc,_cuda_bench.cc}. The
# tests of all .cu files are one binary, kernels_cuda_test, and their benchmarks another: they are carried to the machine that
# has the device.
function(slipstream_operator op)
  set(stem ${CMAKE_CURRENT_SOURCE_DIR}/${op}/${op})
  target_sources(slipstream_kernels PRIVATE ${stem}_ref.cc ${stem}_simd.cc)
  if(SLIPSTREAM_SANITIZE MATCHES "undefined")
    # UBSan's checks of every pointer make unrolled SIMD loops compile for minutes; AddressSanitizer watches the same
    # accesses. Arithmetic checks stay.
    set_source_files_properties(${stem}_simd.cc PROPERTIES COMPILE_OPTIONS
      -fno-sanitize=alignment,null,object-size,pointer-overflow,nonnull-attribute)
  endif()
  if(SLIPSTREAM_HAS_CUDA AND EXISTS ${stem}.cu)
    target_sources(slipstream_kernels PRIVATE ${stem}.cu)
    set_source_files_properties(${stem}_simd.cc ${stem}.cu PROPERTIES COMPILE_DEFINITIONS SLIPSTREAM_CUDA_FORM)
  endif()
  if(SLIPSTREAM_HAS_CUDA AND BUILD_TESTING AND EXISTS ${stem}_cuda_test.cc)
    target_sources(kernels_cuda_test PRIVATE ${stem}_cuda_test.cc)
  endif()
  slipstream_test(${op}/${op}_test LABEL unit DEPENDS slipstream_kernels slipstream_kernels_testing)
  if(EXISTS ${stem}_bench.cc)
    slipstream_benchmark(${op}/${op}_bench DEPENDS slipstream_kernels slipstream_kernels_testing)
  endif()
  if(SLIPSTREAM_HAS_CUDA AND SLIPSTREAM_BENCH AND EXISTS ${stem}_cuda_bench.cc)
    target_sources(kernels_cuda_bench PRIVATE ${stem}_cuda_bench.cc)
  endif()
endfunction()
